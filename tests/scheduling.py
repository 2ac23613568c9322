"""Which tests stay together when several workers share the suite: those that share what takes long to make.

By their names, since pytest 9.2 no longer sees where xdist 3.8 writes the groups of `xdist_group`.
"""

import re

from xdist.scheduler import LoadGroupScheduling

# Of the plans' tests those that look at one filled database (most of them at the same one), what is killed many times
# before anything is looked at, what has a browser, what builds wheels of several versions,
# and checkers that read one recorded history.
TOGETHER = re.compile(
    r"(tests/plans/)(?:test_(?:queue|report|stream_view|watching|mirror)_plans|(\w+))\.py"
    r"::\w+\[((?:sqlite|postgres)-(?:empty|true|hollow))\b"
    r"|(tests/system/test_tool_kills\.py)::\w+\[(sqlite|postgres)"
    r"|(tests/system/test_chat_page\.py)::\w+\[(sqlite|postgres)"
    r"|(tests/system/test_rolling\.py)::"
    r"|(tests/simulation/test_checkers\.py)::"
)


class Together(LoadGroupScheduling):
    """Sends each group to one worker, and any other test to whoever is free."""

    def _split_scope(self, nodeid: str) -> str:
        found = TOGETHER.match(nodeid)
        return " ".join(filter(None, found.groups())) if found else super()._split_scope(nodeid)
