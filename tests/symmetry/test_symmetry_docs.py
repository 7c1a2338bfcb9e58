"""The code in docs/symmetries.md runs."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "symmetries.md"


def test_every_block_of_the_page_runs(capsys) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.S)
    assert len(blocks) >= 5
    exec("\n".join(blocks), {})
    shown = re.search(r"```text\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.S)
    assert shown is not None
    assert capsys.readouterr().out.strip() == shown.group(1).strip()
