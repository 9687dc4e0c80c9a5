"""Links of the documentation that lead out of docs/, for mkdocs.

On the file system a page may link to `../src/keepstep/values.py`. A site has no such page: the link becomes a link into
the repository where mkdocs.yml names one (`repo_url`), else the bare name of the file. A file that does not exist is an
error, as for links between pages.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path, PurePosixPath
from posixpath import normpath
from typing import Any

log = logging.getLogger("mkdocs.hooks.links")

_LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<target>\.\./[^)#\s]*)(?P<anchor>#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    folder = PurePosixPath("docs") / PurePosixPath(page.file.src_uri).parent
    root = Path(config.config_file_path).parent

    def rewritten(link: re.Match[str]) -> str:
        target = normpath(str(folder / link["target"]))
        if target.startswith("docs/"):
            return link[0]
        if not (root / target).exists():
            log.warning("%s links to %s, which does not exist", page.file.src_uri, target)
        if config.repo_url:
            return f"[{link['text']}]({config.repo_url.rstrip('/')}/blob/main/{target}{link['anchor'] or ''})"
        return link["text"]

    return _LINK.sub(rewritten, markdown)
