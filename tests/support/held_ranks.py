"""Runs of several ranks that wait in the middle, so that a test can act on them while they run."""

WORKLOAD = '''

class Held(Ranks):
    """Ranks that wait at item N, of `holds` = {"N": path}, until that file is gone, or they are told to stop."""

    def __init__(self, *, holds: dict = {}, child: bool = False) -> None:
        super().__init__(child=child)
        self.holds = holds

    def __call__(self, items):
        paths = [self.holds.get(str(item.index), "") for item in items]
        # The other ranks, who are not told, wait for the first one.
        while self.task.rank == 0 and any(map(os.path.exists, paths)) and not self.task.stopping():
            time.sleep(0.02)
        return super().__call__(items)
'''


def hold(project, n_items, holds, settings=None, **tables):
    """A project whose run waits at items: `holds` is {N: name of the file in its folder that is removed to let go}."""
    waits = {str(index): name for index, name in holds.items()}
    folder = project(n_items, "Held", settings={"holds": waits, **(settings or {})}, **tables)
    with open(folder / "workloads.py", "a") as file:
        file.write(WORKLOAD)
    for name in waits.values():
        (folder / name).touch()
    return folder
