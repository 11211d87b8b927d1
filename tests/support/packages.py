"""A third-party package as `pip install` leaves it: a module, and entry points."""

from pathlib import Path


def install(site: Path, module: str, source: str, group: str, points: str) -> Path:
    """Put a module into the folder `site`, with lines of entry points in a group; `site` again."""
    about = site / f"{module}-1.0.dist-info"
    about.mkdir(parents=True)
    (site / f"{module}.py").write_text(source)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module.replace('_', '-')}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[{group}]\n{points}")
    return site
