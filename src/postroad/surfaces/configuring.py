"""`postroad config`: every setting, its value without secrets, and which place decided it."""

from typing import TYPE_CHECKING

from postroad.engine.config import CODE, Setting, settings
from postroad.surfaces.output import WrongUse, show_json, show_table

if TYPE_CHECKING:
    from postroad.engine.app import Postroad


def show(reference: str | None, as_json: bool) -> None:
    """Print the settings: of an app, whose code comes first, or of whatever runs in this folder.

    Raises:
        BadApp: It cannot be imported.
        BadSetting: A setting is wrong.
    """
    found = settings() if reference is None else _load(reference).settings()
    if as_json:
        show_json([{"name": one.name, "value": one.plain, "source": one.source} for one in found.values()])
        return
    show_table(
        ("setting", "value", "decided by"),
        [(one.name, "" if one.value is None else one.shown, one.source) for one in found.values()],
    )


def of_app(post: "Postroad", *, database: str | None, schema: str | None) -> dict[str, Setting]:
    """An app's settings under what the command line says.

    Raises:
        WrongUse: The command line says what the code says otherwise, and would be passed over.
    """
    in_code = post.settings()
    for name, option, said in (("database_url", "--database", database), ("schema", "--schema", schema)):
        setting = in_code[name]
        if said is not None and setting.source == CODE and setting.value != said:
            raise WrongUse(
                f"the app's code says {name} = {setting.shown}, which goes before {option}: leave out one of them.",
                field=name,
            )
    return post.settings({"database_url": database, "schema": schema})


def _load(reference: str) -> "Postroad":
    from postroad.surfaces.running import load

    return load(reference)
