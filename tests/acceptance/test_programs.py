"""Programs as users would write them, run as they are."""

import functools
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import psycopg
import pytest
from sqlalchemy import make_url

from postroad import testing

EXAMPLES = Path(__file__).parents[2] / "examples"
SHOP = EXAMPLES / "shop/shop.py"
FREIGHT = EXAMPLES / "freight/agent_in_90_lines.py"


def run(program: str, folder: Path) -> str:
    """What a program prints that is run in a folder of its own."""
    path = folder / "program.py"
    path.write_text(program)
    done = subprocess.run(
        [sys.executable, path.name], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def load(path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A program as a module, in a folder of its own."""
    monkeypatch.chdir(folder)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, path.stem, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.acceptance
def test_the_shop_sends_on_sqlite(tmp_path: Path) -> None:
    """The shop sends one e-mail per order: on a file that was not there before, and once more on the same one."""
    program = "import postroad.bundled_sqlite\n" + SHOP.read_text().partition('"""\n')[2]
    assert run(program, tmp_path) == "to ann@example.com: Thanks (attempt 1, key order/1/thanks)\n"
    assert run(program, tmp_path) == "to ann@example.com: Thanks (attempt 1, key order/2/thanks)\n"


@pytest.mark.acceptance
def test_the_shop_moves_to_postgres_by_its_engine(tmp_path: Path, postgres_url: str, fresh_schema: str) -> None:
    """On Postgres the same shop differs in its engine, in who migrates, and in its own table's identity."""
    with psycopg.connect(postgres_url.replace("+psycopg", "", 1), autocommit=True) as conn:
        conn.execute(f'CREATE SCHEMA "{fresh_schema}"')
    url = make_url(postgres_url).update_query_dict({"options": f"-csearch_path={fresh_schema}"})
    program = SHOP.read_text()
    for before, after in {
        'sqlite.configure(create_engine("sqlite:///shop.db"))': (
            f'create_engine("{url.render_as_string(hide_password=False)}")'
        ),
        "Postroad(engine)": "Postroad(engine, migrate=True)",
        "orders (id integer": "orders (id serial",
    }.items():
        assert program.count(before) == 1
        program = program.replace(before, after)
    assert run(program, tmp_path) == "to ann@example.com: Thanks (attempt 1, key order/1/thanks)\n"


def test_the_readme_shows_the_shop() -> None:
    """The README's first program is the shop, line by line, and it fits into thirty lines."""
    readme = (EXAMPLES.parent / "README.md").read_text("utf-8")
    block = re.search(r"```python shop.py\n(.*?)```", readme, re.DOTALL)
    assert block is not None
    assert block[1].strip() == SHOP.read_text().partition('"""\n')[2].strip()
    assert len(block[1].splitlines()) <= 30


async def test_the_freight_agent_on_sqlite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The freight agent's own test passes on a SQLite file."""
    await load(FREIGHT, tmp_path, monkeypatch).test_second_sms_after_30_minutes()


async def test_the_freight_agent_on_postgres(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, postgres_url: str, fresh_schema: str
) -> None:
    """The freight agent's own test passes on Postgres, with nothing changed but where its harness runs."""
    program = load(FREIGHT, tmp_path, monkeypatch)
    harness = functools.partial(testing.Harness, database=postgres_url, schema=fresh_schema)
    monkeypatch.setattr(program, "Harness", harness)
    await program.test_second_sms_after_30_minutes()


async def test_the_freight_agent_ends_with_a_person(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two unanswered SMS, then a task for a person; when its tool is down an alert is raised and nothing loops."""
    program = load(FREIGHT, tmp_path, monkeypatch)
    alerts: list[str] = []
    program.post.alert_sink(lambda alert: alerts.append(alert.code))
    async with testing.Harness(program.post, start="2026-01-05T07:00Z") as harness:
        harness.fail(program.HERO, program.GiveUp("tool is down"))
        async with program.post.begin() as tx:
            tx.publish("load/481207", program.PING, program.Ping("high"), key="ping_0700")
        await harness.aadvance(2 * 3600)
        assert [d.key for d in harness.sent(program.SMS)] == ["481207/A/1/send_sms", "481207/A/2/send_sms"]
        hero = program.post.dispatches.get("481207/A/3/create_hero_task")
        assert (hero.status, hero.attempt) == ("dead_letter", 1)
        assert (await harness.adrain()).waiting == 0
        kinds = [entry.kind for entry in harness.entries("load/481207")]
    assert len(alerts) == 1
    assert kinds.count("postroad.noop") == 1
    assert kinds.count("AskStep") == 3


def test_the_freight_agent_on_a_model(tmp_path: Path) -> None:
    """A model reads what drivers write: words without an ETA keep the ask open, words with one settle it."""
    program = (EXAMPLES / "freight/on_a_model.py").read_text()
    assert [line.split(": ", 1)[1] for line in run(program, tmp_path).splitlines()] == [
        "the risk is high: ask A, step 1 of 3",
        "the driver named no ETA",
        "the driver answered ask A",
    ]
