"""The notifier: any program that takes where to as an argument and what to say on stdin.

It stands for `ntfy-send`, `mail` or your pager's command. Exit code 0 is success; what it prints is the receipt.
"""

import json
import sys
from pathlib import Path

envelope = json.load(sys.stdin)
to = sys.argv[-1]
with Path("said.txt").open("a") as file:
    file.write(f"{to}: {envelope['body']['text']} (attempt {envelope['attempt']}, key {envelope['key']})\n")
print(f"said-{envelope['dispatch_id'][:8]}")
