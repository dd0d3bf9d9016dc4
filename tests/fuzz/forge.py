"""Mutations that know a format and keep its hashes right, so that what lies behind the hashes is reached."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from safetensors.torch import load as load_bytes
from safetensors.torch import save as save_bytes
from torch import Tensor

from stepquant.artifact import TABLES
from stepquant.files import hash_tensors
from stepquant.plan import PLAN_JSON, PLAN_TENSORS
from tests.fuzz.corpus import forge
from tests.fuzz.mutate import dump, mutate_json

KERNEL_PLAN = "kernels/kernel_plan.json"
MARK = "tests.fuzz.executed"


@dataclass
class Forged:
    """Files with hashes that fit: their new content, what was done, and the place in the JSON that was set."""

    files: dict[str, bytes]
    label: str
    place: tuple[Any, ...] = ()


def hostile_tensor(x: Tensor, random: Random) -> tuple[Tensor, str]:
    """A tensor whose values, type or shape are not what they should be."""
    x = x.clone()
    flat = x.view(-1)
    at = random.randrange(max(len(flat), 1))
    if x.is_floating_point() and random.random() < 0.6:
        value = random.choice((math.nan, math.inf, -math.inf, 0.0, -1.0, 1e-45, 1e38, 3.0))
        flat[at if random.random() < 0.5 else slice(None)] = value
        return x, f"values {value}"
    if not x.is_floating_point() and random.random() < 0.6:
        value = random.choice((0, 1, 3, 5, 7, 9, 15, 16, 17, 32, 127, 255 if x.dtype == torch.uint8 else -1))
        flat[at if random.random() < 0.7 else slice(None)] = value
        return x, f"values {value}"
    kind = random.choice(("type", "flat", "empty", "longer", "scalar", "order", "roll"))
    if kind == "type":
        return x.to(random.choice((torch.float64, torch.float16, torch.int32, torch.bool, torch.bfloat16))), kind
    if kind == "order":
        return x[..., torch.randperm(x.shape[-1], generator=torch.Generator().manual_seed(at))].contiguous(), kind
    changed = {"flat": flat, "empty": x[:0], "longer": torch.cat([x, x]), "scalar": flat[:1].view(()),
               "roll": x.roll(1, 0)}[kind]  # fmt: skip
    return changed.contiguous(), kind


def forge_plan(sound: dict[str, bytes], random: Random) -> Forged:
    data, tensors = json.loads(sound[PLAN_JSON]), load_bytes(sound[PLAN_TENSORS])
    place: tuple[Any, ...] = ()
    label = ""
    if random.random() < 0.5:
        data, label, place = mutate_json(data, random)
        if place and (
            place[0] in ("tensors_sha256", "plan_sha256", "json_sha256") or "drop" in label or "swap" in label
        ):
            place = ()
    else:
        name = random.choice(sorted(tensors))
        tensors[name], label = hostile_tensor(tensors[name], random)
        label = f"{name} {label}"
    with contextlib.suppress(ValueError, RecursionError, AttributeError, TypeError):
        data = forge(data, tensors)
    text, more = (
        dump(data, random) if random.random() < 0.2 else (json.dumps(data).encode("utf-8", "surrogatepass"), "")
    )
    return Forged({PLAN_JSON: text, PLAN_TENSORS: save_bytes(tensors)}, f"forged {label}{more}", () if more else place)


def forge_tables(sound: dict[str, bytes], random: Random) -> Forged:
    tensors = load_bytes(sound[TABLES])
    size = int.from_bytes(sound[TABLES][:8], "little")
    head = json.loads(json.loads(sound[TABLES][8 : 8 + size])["__metadata__"]["stepquant"])
    label = ""
    if random.random() < 0.5:
        head, label, _ = mutate_json(head, random)
    else:
        name = random.choice(sorted(tensors))
        tensors[name], label = hostile_tensor(tensors[name], random)
    if random.random() < 0.1:
        tensors[random.choice(("", "x", "distortion", "a/b", "/", "distortion/", "../x/y"))] = torch.ones(2)
    if isinstance(head, dict) and random.random() < 0.9:
        head["tensors_sha256"] = hash_tensors(tensors)
    text = json.dumps(head).encode("utf-8", "replace").decode()
    return Forged({TABLES: save_bytes(tensors, {"stepquant": text})}, f"forged {label}")


def forge_json(name: str) -> Callable[[dict[str, bytes], Random], Forged]:
    def forger(sound: dict[str, bytes], random: Random) -> Forged:
        value, label, _ = mutate_json(json.loads(sound[name]), random)
        text, more = dump(value, random)
        return Forged({name: text}, label + more)

    return forger


def forge_source(sound: dict[str, bytes], random: Random) -> Forged:
    """A kernel that was edited: valid Python that would show that it ran."""
    name = random.choice([n for n in sound if n.endswith(".py")])
    text = sound[name].decode()
    evil = f"import sys\nsys.modules[{MARK!r}] = sys\n"
    lines = text.splitlines(keepends=True)
    at = random.randrange(len(lines) + 1)
    edited = random.choice((evil + text, text + evil, "".join([*lines[:at], "\n", *lines[at:]]), evil, text + " ",
                            text.replace("+", "-", 1), "".join(lines[:at] + lines[at + 1 :])))  # fmt: skip
    return Forged({name: edited.encode()}, "edited source") if edited != text else Forged({name: b""}, "emptied source")


def forge_recipe(sound: dict[str, bytes], random: Random) -> Forged:
    ((name, data),) = sound.items()
    text = data.decode()
    hostile = random.choice((
        "x: !!python/object/apply:os.system ['true']\n", "x: !!python/name:os.system\n", "budget: &a [*a]\n",
        "a: &a [1,1,1,1,1,1,1,1,1]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b,*b,*b]\n"
        "d: &d [*c,*c,*c,*c,*c,*c,*c,*c,*c]\ne: &e [*d,*d,*d,*d,*d,*d,*d,*d,*d]\nf: &f [*e,*e,*e,*e,*e,*e,*e,*e,*e]\n"
        "g: [*f,*f,*f,*f,*f,*f,*f,*f,*f]\n",
        "name: ${name}\n", "budget: ${budget}\n", "budget: {bits: ${budget.bits}}\n",
        "defaults: [../../../etc/passwd]\n",
        "defaults: [mine]\n", "defaults: {a: 1}\n", "x: " + "[" * 2000 + "\n", "budget: {bits: 1e400}\n",
        "budget: {bits: .nan}\n", "spatial: {gamma: -.inf}\n", "data: {segments: -5}\n", "data: {segments: 1e30}\n",
        "samples: {per_layer: 99999999999999999999}\n", "solver: !!set {a, b}\n", "output: /etc\n", "? [a, b]\n: c\n",
        "budget: 2001-01-01\n", "name: !!binary aGk=\n", "\t- x\n", "%YAML 9.9\n---\n", "---\na: 1\n---\nb: 2\n",
        "hydra: {run: {dir: /tmp/x}}\n", "temporal: {horizon: 1e99}\n", "pivots: {count: -1}\n", "budget: !!null\n",
        "model: {trust_remote_code: maybe}\n", "seed: 1_0\n", "window: {length: 0x8}\n", "name: \"a\\0b\"\n",
        "codegen: {targets: ['../../x']}\n",
    ))  # fmt: skip
    new = random.choice((hostile, text + hostile, hostile + text, text.replace("budget:", hostile + "budget:", 1)))
    return Forged({name: new.encode()}, f"yaml {hostile[:30]!r}")
