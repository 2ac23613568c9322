"""A second process on a SQLite file: carries out transactions of `tests.races.works`, one for each line that it reads.

`python -m tests.races.second URL SCENE` writes a line when it is about to begin, one when its transaction has begun,
and one with the answer.
"""

import json
import pickle
import sys
from pathlib import Path
from typing import Any

from tests.races.scene import Scene, plain, program, unsynced
from tests.races.works import WORKS, carried_out


def say(what: str, value: Any = None) -> None:
    """Tell the test."""
    print(json.dumps([what, value]), flush=True)


def serve(url: str, scene_file: str) -> None:
    """Carry out what is asked for."""
    database = unsynced(url)
    scene = Scene(**pickle.loads(Path(scene_file).read_bytes()), post=program(database))
    for line in sys.stdin:
        say("begins")
        answer = carried_out(database, WORKS[line.strip()], scene, "b", began=lambda: say("began"))
        say("answer", plain(answer))


if __name__ == "__main__":
    serve(*sys.argv[1:])
