"""`postroad migrate`: the schema's ladder, as an operator climbs it."""

from postroad.store import migrations
from postroad.surfaces import reading
from postroad.surfaces.output import say, show_json, show_table, when


def apply(url: str | None, schema: str | None, as_json: bool) -> None:
    """Bring the schema up to this code's, and say which steps that took."""
    with reading.opened(url, schema, creating=True) as database:
        applied = migrations.migrate(database)
    if as_json:
        show_json({"applied": applied, "version": migrations.latest})
    elif applied:
        say(f"applied {', '.join(applied)}: the schema is at {migrations.latest}")
    else:
        say(f"nothing to do: the schema is at {migrations.latest}")


def steps(url: str | None, schema: str | None, as_json: bool) -> None:
    """List every step, with when it was applied."""
    with reading.opened(url, schema) as database:
        found = database.read(migrations.status)
    if as_json:
        show_json([reading.plain(step) for step in found])
        return
    show_table(
        ("step", "applied", "runs with code from"),
        [(f"{step.version:04} {step.name}", when(step.applied_at) or "not yet", step.oldest_code) for step in found],
    )


def verify(url: str | None, schema: str | None, as_json: bool) -> None:
    """See whether this code may run on the schema; raises SchemaMismatch if not."""
    with reading.opened(url, schema) as database:
        database.read(migrations.check)
        version = database.read(migrations.current)
    if as_json:
        show_json({"version": version, "needed": migrations.latest})
    else:
        say(f"the schema, at {version}, fits this code")
