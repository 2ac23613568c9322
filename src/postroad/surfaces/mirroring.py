"""`postroad stream mirror`: a stream's log written to files."""

from pathlib import Path

from postroad.agent.mirror import Caught, Mirror
from postroad.model.ids import check_stream, stream_type
from postroad.store import migrations, stream_views
from postroad.surfaces import reading
from postroad.surfaces.output import NotFound


def mirrored(stream: str, folder: Path, url: str | None, schema: str | None) -> tuple[Path, Caught]:
    """The file to which a stream's log was written, and what that took.

    Raises:
        NotFound: There is no trace of the stream.
        Refused: Another process keeps the mirror in this folder, or it cannot be written to.
    """
    mirror = Mirror(folder, stream_type(check_stream(stream)))
    with reading.opened(url, schema) as database:
        database.read(migrations.check)
        if database.read(stream_views.head, stream) is None:
            raise NotFound(f"No stream {stream!r}.", stream=stream)
        return mirror.path(stream), mirror.write(database, stream)
