"""The kernels of an artifact as they lie on disk: read strictly and checked against their hash, never executed."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepquant.accounting import page_layout, why_simulated
from stepquant.artifact import KERNELS
from stepquant.codegen.generate import GENERATOR_VERSION, generate, source_hash
from stepquant.codegen.kernel_plan import (
    SCHEMA_VERSION,
    TITLES,
    KernelPlan,
    Launch,
    TargetReport,
    Variant,
    launches_of,
)
from stepquant.codegen.spec import KernelSpec
from stepquant.errors import ArtifactError, closest, shown
from stepquant.files import dump_json, read_json
from stepquant.json_checks import AGAIN, Kinds, check_object
from stepquant.plan import LayoutPlan
from stepquant.reading import check_file

KERNEL_PLAN = "kernel_plan.json"
MAX_SOURCE_BYTES = 1 << 20
MAX_PER_ELEMENT = 1_000_000  # instructions; more are no report of a compile

_NUMBER = (int, float)
_PLAN: Kinds = {"schema_version": int, "plan": str, "generator_version": str, "source_sha256": str, "spec": dict,
                "variants": list}  # fmt: skip
_VARIANT: Kinds = {"name": str, "title": str, "file": str, "programs": int, "bodies": int, "tile": dict,
                   "elements": int, "bytes_read": int, "bytes_written": int, "flops": int, "launch": dict,
                   "stages": int, "predicted_us": dict, "targets": dict}  # fmt: skip
_LAUNCH: Kinds = {"warps": int, "registers": (int, type(None))}
_REPORT: Kinds = {"launch": dict, "registers": int, "spill_bytes": int, "shared_bytes": int, "instructions": int,
                  "instructions_per_element": _NUMBER, "seconds": _NUMBER, "rejected": list}  # fmt: skip


@dataclass(frozen=True)
class KernelFiles:
    """What kernels/ holds.

    Attributes:
        data: kernel_plan.json as it is; variants: the same, typed.
        sources: text by name of the variant.
        current: whether this stepquant generates the same sources from the plan.
    """

    data: dict[str, Any]
    variants: list[Variant]
    sources: dict[str, str]
    current: bool

    def source(self, name: str) -> str:
        """The text of one variant.

        Raises:
            ArtifactError: for a name that the plan does not have.
        """
        if name not in self.sources:
            why = f"no such variant{closest(name, self.sources)}"
            if name in TITLES:
                why = f"plans with window.length={'1' if name == 'step' else '2 or more'} have it"
            raise ArtifactError(f"--source {shown(name)}: {why}; this plan has {', '.join(sorted(self.sources))}")
        return self.sources[name]


def read_kernels(directory: Path, plan: LayoutPlan) -> KernelFiles:
    """Read kernels/ of an artifact whose plan is `plan`.

    Raises:
        ArtifactError: kernels/ is missing, damaged, another plan's, or a source is not what its hash says.
    """
    if (reason := why_simulated(plan)) is not None:
        raise ArtifactError(f"{directory}: there are no kernels: {reason}")
    place = directory / KERNELS
    if not os.path.lexists(place):
        raise ArtifactError(f"{place}: the directory of generated kernels is missing; {AGAIN}")
    path = place / KERNEL_PLAN
    data = read_json(path, "the kernel plan")
    version = data.get("schema_version")
    if version != SCHEMA_VERSION:
        raise ArtifactError(
            f"{path}: schema_version is {shown(version)}; this stepquant reads {SCHEMA_VERSION}; {AGAIN}"
        )
    check_object(f"{path}: ", data, _PLAN)
    _check_owner(path, data, plan)
    variants = [_variant(f"{path}: variants[{i}]", entry) for i, entry in enumerate(data["variants"])]
    names = [v.name for v in variants]
    if not names or len(set(names)) < len(names):
        raise ArtifactError(f"{path}: variants are {shown(names)}; expected at least one, each once; {AGAIN}")
    sources = {v.name: _source(place / v.file) for v in variants}
    if more := sorted({other.stem for other in place.glob("*.py")} - set(sources)):
        raise ArtifactError(f"{place / more[0]}.py: {KERNEL_PLAN} has no such kernel; {AGAIN}")
    _check_hash(place, data["source_sha256"], sources, plan)
    spec = _spec(plan)
    current = sources == generate(spec, plan.hash)
    if current:  # the sources name the version that generated them
        if data["generator_version"] != GENERATOR_VERSION:
            raise ArtifactError(
                f"{path}: generator_version is {shown(data['generator_version'])}; the sources are of version "
                f"{GENERATOR_VERSION}; {AGAIN}"
            )
        _check_figures(path, data, variants, sources, plan, spec)
    return KernelFiles(data, variants, sources, current)


def stated_hash(directory: Path, plan: LayoutPlan) -> str | None:
    """Hash of the sources in kernels/ as kernel_plan.json states it, None for an artifact without kernels.

    What a server compares with the kernels that it generates: the rest of kernel_plan.json is for readers.

    Raises:
        ArtifactError: kernels/ is another plan's, or a source is not what it was when the artifact was written.
    """
    path = directory / KERNELS / KERNEL_PLAN
    if not os.path.lexists(path):
        return None
    data = read_json(path, "the kernel plan")
    found = data.get("source_sha256")
    if not isinstance(found, str):
        raise ArtifactError(f"{path}: source_sha256 is {shown(found)}; expected a hash; {AGAIN}")
    _check_owner(path, data, plan)
    _check_hash(path.parent, found, {p.stem: _source(p) for p in sorted(path.parent.glob("*.py"))}, plan)
    return found


def _check_owner(path: Path, data: dict[str, Any], plan: LayoutPlan) -> None:
    if data.get("plan") != plan.hash:
        raise ArtifactError(f"{path}: plan is {shown(data.get('plan'))}; expected {plan.hash}; {AGAIN}")


def _check_hash(place: Path, stated: str, sources: dict[str, str], plan: LayoutPlan) -> None:
    if source_hash(sources) != stated:
        ours = generate(_spec(plan), plan.hash)
        edited = [f"{name}.py" for name in sorted({*ours, *sources}) if sources.get(name) != ours.get(name)]
        raise ArtifactError(
            f"{place}: the sources do not match source_sha256 of {KERNEL_PLAN} ("
            f"{', '.join(edited[:6]) or 'none'} differ from what this stepquant generates); {AGAIN}"
        )


def _check_figures(
    path: Path, data: dict[str, Any], variants: list[Variant], sources: dict[str, str], plan: LayoutPlan,
    spec: KernelSpec,
) -> None:  # fmt: skip
    """Refuse figures that do not follow from the plan and from the reports of the ahead-of-time compile."""
    ours = KernelPlan.of(page_layout(plan), spec, sources, plan.hash, GENERATOR_VERSION, data["source_sha256"])
    reports = {v.name: v.targets for v in variants}
    for variant in ours.variants:
        variant.targets = reports[variant.name]
        known = launches_of(spec, variant.name)
        for target, report in variant.targets.items():
            if report.launch not in known:
                raise ArtifactError(
                    f"{path}: the launch of {variant.name} for {shown(target)} is {report.launch}; expected one of "
                    f"{', '.join(map(str, known))}; {AGAIN}"
                )
        variant.predict()
    if differs := _difference(data, json.loads(dump_json(ours.to_json())), ""):
        raise ArtifactError(f"{path}: {differs}; {AGAIN}")


def _difference(found: Any, expected: Any, where: str) -> str:
    """The first place in which two JSON values differ, in words; empty where they do not."""
    if isinstance(found, dict) and isinstance(expected, dict) and found.keys() == expected.keys():
        parts = [(found[key], expected[key], f"{where}.{key}" if where else key) for key in sorted(found)]
    elif isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        parts = [(*pair, f"{where}[{i}]") for i, pair in enumerate(zip(found, expected, strict=True))]
    else:
        return "" if found == expected else f"{where} is {shown(found)}; expected {shown(expected)}"
    return next(filter(None, (_difference(*part) for part in parts)), "")


def _spec(plan: LayoutPlan) -> KernelSpec:
    g, window = plan.geometry, plan.window
    return KernelSpec.of(g.family, g.num_key_heads, page_layout(plan), plan.codec, window.length, window.dtype)


def _source(path: Path) -> str:
    check_file(path, "a generated kernel", MAX_SOURCE_BYTES)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{path}: the generated kernel cannot be read ({error}); {AGAIN}") from None
    if not text.replace("\n", "").isprintable():  # a terminal would obey escape sequences
        raise ArtifactError(f"{path}: the generated kernel holds control characters; {AGAIN}")
    return text


def _variant(where: str, entry: Any) -> Variant:
    check_object(f"{where}.", entry, _VARIANT)
    name = entry["name"]
    if name not in TITLES or entry["file"] != f"{name}.py":
        raise ArtifactError(
            f"{where} is {shown(name)} in {shown(entry['file'])}; expected one of {', '.join(TITLES)} in NAME.py; "
            f"{AGAIN}"
        )
    check_object(f"{where}.tile.", entry["tile"], {"rows": int, "columns": int})
    check_object(f"{where}.predicted_us.", entry["predicted_us"], dict.fromkeys(entry["predicted_us"], _NUMBER))
    check_object(f"{where}.targets.", entry["targets"], dict.fromkeys(entry["targets"], dict))
    targets = {target: _report(f"{where}.targets.{target}", report) for target, report in entry["targets"].items()}
    return Variant(**{**entry, "launch": _launch(f"{where}.launch", entry["launch"]), "targets": targets})


def _report(where: str, entry: Any) -> TargetReport:
    check_object(f"{where}.", entry, _REPORT)
    if not all(isinstance(reason, str) and reason.isprintable() for reason in entry["rejected"]):
        raise ArtifactError(f"{where}.rejected is {shown(entry['rejected'])}; expected a list of strings; {AGAIN}")
    if entry["instructions_per_element"] > MAX_PER_ELEMENT:
        count = shown(entry["instructions_per_element"])
        raise ArtifactError(f"{where}.instructions_per_element is {count}; expected at most {MAX_PER_ELEMENT}; {AGAIN}")
    return TargetReport(**{
        **entry, "launch": _launch(f"{where}.launch", entry["launch"]), "rejected": tuple(entry["rejected"]),
    })  # fmt: skip


def _launch(where: str, entry: Any) -> Launch:
    check_object(f"{where}.", entry, _LAUNCH)
    return Launch(**entry)
