"""`postroad config`: every setting, its value without secrets, and which place decided it."""

from typing import TYPE_CHECKING

from postroad.engine.config import CODE, BadSetting, Setting, settings, unknown_variables
from postroad.engine.refusals import refusals
from postroad.surfaces.output import WrongUse, say_error, show_json, show_table

if TYPE_CHECKING:
    from postroad.engine.app import Postroad


def show(reference: str | None, as_json: bool) -> None:
    """Print the settings: of an app, whose code comes first, or of whatever runs in this folder.

    Raises:
        BadApp: It cannot be imported.
        BadSetting: A setting is wrong, or none that `postroad run` takes.
    """
    found = settings() if reference is None else _load(reference).settings()
    for said in unknown_variables():
        say_error(said)
    refused = list(refusals(found))
    if as_json and not refused:
        show_json([{"name": one.name, "value": one.plain, "source": one.source} for one in found.values()])
    elif not as_json:
        show_table(
            ("setting", "value", "decided by"),
            [(one.name, "" if one.value is None else one.shown, one.source) for one in found.values()],
        )
    if refused:
        raise BadSetting(" ".join(error.detail for error in refused), field=refused[0].about["field"])


def of_app(
    post: "Postroad",
    *,
    database: str | None,
    schema: str | None,
    grace: float | None = None,
    poll: float | None = None,
) -> dict[str, Setting]:
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
    return post.settings({"database_url": database, "schema": schema, "grace": grace, "poll": poll})


def _load(reference: str) -> "Postroad":
    from postroad.surfaces.running import load

    return load(reference)
