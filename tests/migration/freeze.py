"""Write the first step of the ladder from the schema: `python -m tests.migration.freeze`.

Only until the first release; from then on a step is never changed and a difference is another step.
"""

import re
from pathlib import Path

from sqlalchemy import make_url
from sqlalchemy.schema import CreateIndex, CreateTable

from postroad.store import migrations, schema
from postroad.store.migrations.steps import STEPS

FOLDER = Path(migrations.__file__).parent
DIALECTS = {
    "postgresql": make_url("postgresql+psycopg://").get_dialect()(),
    "sqlite": make_url("sqlite://").get_dialect()(),
}


def text(name: str) -> str:
    """The whole schema as SQL for one dialect."""
    statements = []
    for table in schema.metadata.sorted_tables:
        statements.append(str(CreateTable(table).compile(dialect=DIALECTS[name])))
        ordered = sorted(table.indexes, key=lambda index: str(index.name))
        statements += [str(CreateIndex(index).compile(dialect=DIALECTS[name])) for index in ordered]
    return "".join(f"{tidy(statement)};\n" for statement in statements)


def tidy(statement: str) -> str:
    """The statement without trailing blanks, with the mark before its table's name."""
    lines = [line.rstrip().replace("\t", "    ") for line in statement.strip().splitlines() if line.strip()]
    return re.sub(r"(CREATE TABLE | ON )postroad_", r"\1{p}", "\n".join(lines))


def main() -> None:
    """Write the files of the first step."""
    for name in DIALECTS:
        (FOLDER / f"{STEPS[0].title}.{name}.sql").write_text(text(name))


if __name__ == "__main__":
    main()
