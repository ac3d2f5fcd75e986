"""A mount that a unit makes on a machine with a systemd of its own, as `tests.mount.restarting` uses mounts: its programs
run outside of the machine, and reach the mount through /proc."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.lab.client import LabStore
from tests.mount.mounts import NOISE, Completed, eventually
from tests.operations.debian import PLACE, Machine, Rootfs
from tests.operations.test_systemd import machine_files

UNIT = "cachefs@mnt-held.service"
PATH = "/mnt/held"


class UnitMount:
    def __init__(self, machine: Machine, place: Path) -> None:
        self.machine = machine
        self.path = machine.outside(PATH)
        self.allowed: list[str] = []
        self.pids: list[int] = []  # none of them is of this machine's numbers
        self.killed = False
        self.log_file = place / "journal"

    def start(self) -> None:
        self.machine.succeed("systemctl", "start", UNIT, timeout=120)

    def ask(self, verb: str) -> Any:
        return json.loads(self.machine.succeed("cachefs", verb, "--json", PATH))

    def cli(self, *words: object, timeout: float = 60) -> Completed:
        inside = [PATH if word == self.path else word for word in words]
        return self.machine.run("cachefs", *inside, timeout=timeout)

    def kill_daemon(self) -> None:
        self.machine.succeed("sh", "-c", f"kill -9 {self.ask('status')['pid']}")

    def kill_holder(self) -> None:
        eventually(lambda: self.machine.show(UNIT, "NFileDescriptorStore") == "2", "what is stored")
        self.machine.succeed("systemctl", "kill", "--kill-whom=main", "--signal=KILL", UNIT)

    def finish(self) -> list[str]:
        """Stop it; what is wrong afterwards."""
        stopped = self.machine.run("systemctl", "stop", UNIT, timeout=180)
        wrong = [f"stop: {stopped.stderr}"] if stopped.returncode else []
        wrong += [f"{count} mounts are left" for count in [self.machine.layers(PATH)] if count]
        kept = self.machine.show(UNIT, "NFileDescriptorStore")
        wrong += [f"{kept} descriptors are stored"] if kept != "0" else []
        journal = self.machine.journal(UNIT)
        self.log_file.write_text(journal)
        return wrong + [
            f"in the journal: {line}"
            for line in journal.splitlines()
            if NOISE.search(line) and not any(re.search(pattern, line) for pattern in self.allowed)
        ]


@contextmanager
def unit_mount(
    place: Path, store: LabStore, source: str, options: Mapping[str, str | int]
) -> Iterator[UnitMount]:
    """With `options`; not started yet."""
    rootfs = Rootfs(PLACE)
    files = machine_files(store)
    config = {
        "source": source,
        "endpoint_url": store.endpoint,
        "cache_dir": "/var/cache/cachefs/mnt-held",
        "allow_other": True,
        **options,
    }
    files["/etc/cachefs/mnt-held.toml"] = "".join(
        f"{name} = {json.dumps(value)}\n" for name, value in config.items()
    )
    files["/etc/cachefs/mnt-held.env"] = files["/etc/cachefs/mnt-data.env"]
    files["/etc/tmpfiles.d/held.conf"] = f"d {PATH}\n"
    with Machine(rootfs, place, files) as machine:
        yield UnitMount(machine, place)
