"""`adx doctor`: what this machine can build and run, and what is missing for the rest."""

from __future__ import annotations

import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from adx.cli import machine
from adx.cli.command import AdxCommand, Spelling, Values
from adx.cli.options import TARGET_ALIASES, TARGET_NAMES, TARGETS
from adx.cli.output import Output
from adx.engines.devices import Gpu, gpus
from adx.export.errors import BackendError

if TYPE_CHECKING:
    from rich.console import RenderableType

PACKAGES = ("adx-toolchain", "torch", "transformers", "onnx", "onnx-ir", "numpy", "tokenizers", "safetensors", "gguf")


def run(values: Values, output: Output) -> int:
    """Look at the machine; a target that was named and cannot be used is an error."""
    cpu, devices = machine.cpu(), gpus()
    backends = machine.backends(devices)
    memory, available = machine.memory_bytes()
    disk, free = machine.disk_bytes(Path.cwd())
    facts = {
        "targets": {item.target: item for item in backends},
        "cpu": {
            "model": cpu.model,
            "features": cpu.features,
            "host_cpus": cpu.host,
            "affinity_cpus": cpu.affinity,
            "cgroup_cpus": cpu.quota,
            "usable_cpus": cpu.usable,
        },
        "gpus": devices,
        "memory_bytes": memory,
        "memory_available_bytes": available,
        "disk_bytes": disk,
        "disk_free_bytes": free,
        "platform": platform.platform(),
        "python": sys.version.split()[0],
        "packages": machine.installed(*PACKAGES),
    }
    output.result(facts, describe(facts, cpu, backends, devices))
    for item in backends:
        if item.target == values["target"] and not item.usable:
            partly = " (it can be built)" if item.builds else ""
            output.error(f"{item.target} cannot be run here{partly}: {'; '.join(item.missing)}")
            return BackendError.exit_code
    return 0


def describe(
    facts: dict[str, object], cpu: machine.Cpu, backends: tuple[machine.Backend, ...], devices: tuple[Gpu, ...]
) -> list[RenderableType]:
    """The machine, for people."""
    from rich.table import Table

    table = Table("target", "build", "run", "installed", "missing")
    for item in backends:
        versions = ", ".join(f"{name} {version}" for name, version in item.versions.items())
        build = ", ".join(item.builds_for) or ("yes" if item.builds else "no")
        run = "yes" if item.runs else "no"
        table.add_row(item.target, build, run, versions or "-", "; ".join(item.missing) or "-")
    quota = "no limit" if cpu.quota is None else f"{cpu.quota:g}"
    packages = facts["packages"]
    assert isinstance(packages, dict)
    gigabytes = {name: f"{value / 1e9:.1f} GB" for name, value in facts.items() if isinstance(value, int)}
    return [
        table,
        f"CPU       {cpu.model}",
        f"          {', '.join(cpu.features) or 'no vector extensions known to adx'}",
        f"          usable {cpu.usable} (host {cpu.host}, affinity {cpu.affinity}, cgroup {quota})",
        f"GPU       {', '.join(f'{gpu.name} ({gpu.capability})' for gpu in devices) or 'none'}",
        f"memory    {gigabytes['memory_bytes']}, {gigabytes['memory_available_bytes']} available",
        f"disk      {gigabytes['disk_free_bytes']} free of {gigabytes['disk_bytes']} in {Path.cwd()}",
        f"system    {facts['platform']}, Python {facts['python']}",
        f"packages  {', '.join(f'{name} {version}' for name, version in packages.items())}",
    ]


command = AdxCommand(
    "doctor",
    run,
    help="""Show what this machine can build and run, and what is missing for the rest.

    With --target, exit code 5 says that this target cannot be used here.""",
    sections={
        "Machine": [
            click.Option(
                ["-e", "--target"],
                type=click.Choice(TARGETS),
                help="Fail unless this target can be built and run here.",
            ),
        ],
    },
    spelling=Spelling(aliases=TARGET_ALIASES, values={"--target": TARGET_NAMES}),
)
