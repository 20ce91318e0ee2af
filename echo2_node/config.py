"""A run in one typed TOML file, and an actor's few settings.

`load_run` reads a file, applies `key.path=value` overrides and reports errors with the path of
the offending key. What exists is legal: bounds are in the types, relations in `_check`.
"""

from __future__ import annotations

import difflib
import types
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from echo2_mesh import limits
from echo2_mesh.errors import UsageError
from echo2_mesh.settings import BulkSettings

Positive = Annotated[int, Meta(ge=1, le=2**53)]
NonNegative = Annotated[int, Meta(ge=0, le=2**53)]
Seconds = Annotated[float, Meta(gt=0.0)]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every table of the file: immutable, and a misspelt key is an error."""


class RunSection(Section, frozen=True, kw_only=True):
    name: Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9-]{0,39}$(?!\n)")] = "run"
    """Prefix of the run id; also the name of the state folder."""
    seed: NonNegative = 0
    """Names the prompts: the same seed gives the same items in the same order."""
    steps: Positive = 100
    """Training steps until the run ends by itself."""


class ModelSection(Section, frozen=True, kw_only=True):
    path: str
    """A Hugging Face causal-LM folder: config.json, *.safetensors, tokenizer."""


class TaskSection(Section, frozen=True, kw_only=True):
    id: str
    """Which task: sort_digits or countdown; the only line to change for another."""
    args: dict[str, Any] = {}
    """The task's own arguments; an unknown one is named when the run starts."""


class RolloutSection(Section, frozen=True, kw_only=True):
    groups_per_step: Positive = 16
    """P: prompt groups consumed by one training step."""
    group_size: Annotated[int, Meta(ge=2, le=limits.GROUP_SIZE_MAX)] = 8
    """G: samples of one prompt; 1 has no baseline and is refused."""
    tokens_max: Annotated[int, Meta(ge=1, le=limits.PAYLOAD_TOKENS_MAX)] = 256
    """Longest completion in tokens; longer ones are cut and count as unfinished."""
    temperature: Annotated[float, Meta(gt=0.0, le=10.0)] = 1.0
    """Of sampling; log-probs are taken after it."""
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    """1 samples from everything, which keeps the importance ratio exact."""
    top_k: NonNegative = 0
    """0 is off."""
    lease_ttl_s: Seconds = 300.0
    """How long an actor may take for a prompt group before it is offered again."""
    refills_per_group_max: NonNegative = 3
    """A group that lost members more often than this is abandoned."""
    zero_variance_groups_max: Positive = 2000
    """Groups in a row with equal rewards before the run ends: there is nothing left to learn."""


class StalenessSection(Section, frozen=True, kw_only=True):
    limit_steps: NonNegative = 3
    """S: a trajectory may be at most this many versions old when it is trained."""
    publish_every_steps: Annotated[int, Meta(ge=1)] | Literal["paper"] = 1
    """kappa; "paper" is Echo-2's max(1, S - 1)."""
    policy: Literal["paced", "discard"] = "paced"
    """paced: leases wait for a slot, so nothing is born stale. discard: lease all, drop later."""

    @property
    def kappa_steps(self) -> int:
        """The publication period in training steps (paper section 4.1 for the preset)."""
        if self.publish_every_steps == "paper":
            return max(1, self.limit_steps - 1)
        return self.publish_every_steps


class LearnerSection(Section, frozen=True, kw_only=True):
    loss: str = "dppo"
    """dppo (recommended), dapo or grpo."""
    loss_args: dict[str, Annotated[float, Meta(ge=-1e18, le=1e18)]] = {}
    """Arguments of the loss by name; an unknown one is answered with the known ones."""
    lr: Annotated[float, Meta(gt=0.0, le=10.0)] = 1e-6
    """AdamW's learning rate: about 1e-6 for a whole model; less with more staleness."""
    lr_warmup_steps: NonNegative = 0
    """Steps over which the learning rate rises from zero."""
    adam_beta1: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.9
    """Decay of AdamW's first moment."""
    adam_beta2: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.99
    """Decay of AdamW's second moment."""
    adam_eps: Annotated[float, Meta(gt=0.0)] = 1e-8
    """AdamW's epsilon."""
    weight_decay: Annotated[float, Meta(ge=0.0)] = 0.0
    """AdamW's decoupled weight decay."""
    grad_clip: Annotated[float, Meta(gt=0.0)] = 1.0
    """Largest norm of the gradient."""
    tokens_per_micro_batch: Positive = 16384
    """Tokens, padding included, of one forward and backward pass; bounds memory."""
    logprob_chunk_tokens: Positive = 1024
    """Positions whose logits exist at once; bounds memory by this times the vocabulary."""
    skipped_steps_max: Positive = 5
    """Non-finite steps in a row before the run stops."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: the GPU where there is one."""
    threads: NonNegative = 0
    """Torch threads; 0 chooses from the cores. Shared small hosts want 1."""
    checkpoint_every_steps: Positive = 10
    """A crash costs at most so many steps; nothing accepted is lost."""
    checkpoints_kept: Positive = 2
    """Older ones are deleted."""


class MeshSection(Section, frozen=True, kw_only=True):
    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/4201",)
    """Multiaddresses; port 0 lets the system choose."""
    announce: tuple[str, ...] = ()
    """What to tell others instead, e.g. the router's address with a forwarded port."""
    bootstrap: tuple[str, ...] = ()
    """Addresses (with /p2p/<id>) of any live members, beside those remembered."""
    mdns: bool = True
    """Find nodes on the local network."""
    relay: bool = True
    """Carry connections for nodes behind NATs, within limits, if this one can be dialled."""
    bulk_listen: tuple[str, ...] = ()
    """Where weights are served, beside `listen`; empty: the same hosts on a free port."""
    bulk_announce: tuple[str, ...] = ()
    """What to tell others instead, where that port is forwarded too."""
    uplink_mbit_per_s: Annotated[float, Meta(ge=0.0)] = 0.0
    """Cap of weights sent; 0 for none."""
    downlink_mbit_per_s: Annotated[float, Meta(ge=0.0)] = 0.0
    """Cap of weights received; 0 for none."""
    open: bool = True
    """False: only holders of the ticket's secret get leases."""
    ticket_hours: Annotated[float, Meta(ge=0.0)] = 0.0
    """Life of printed tickets; 0 is for ever."""
    chunk_size_bytes: Annotated[int, Meta(ge=4096, le=limits.CHUNK_SIZE_BYTES_MAX)] = (
        limits.CHUNK_SIZE_BYTES_DEFAULT
    )
    """Weights are cut into pieces of this size."""
    store_quota_bytes: Positive = limits.STORE_QUOTA_BYTES_DEFAULT
    """Disk for weights and rollouts; the least recently used goes first."""


class WeightsSection(Section, frozen=True, kw_only=True):
    patch_steps_max: Annotated[int, Meta(ge=0, le=limits.MANIFEST_PATCHES_MAX)] = 16
    """Patches a late actor may follow, one a version; 0 publishes whole versions only."""
    patch_size: Literal["fast", "small"] = "fast"
    """`small`: a quarter fewer bytes for three times the work; for links under 100 Mbit/s."""
    versions_kept: Annotated[int, Meta(ge=1, le=limits.SHELF_VERSIONS_MAX)] = limits.KEPT_VERSIONS
    """Whole versions that stay on the learner's disk; 4 or 8 allow longer skips of patches."""
    full_disk_wait_s: Seconds = 600.0
    """How long a full disk may hold up a version before the run ends."""


class RunConfig(Section, frozen=True, kw_only=True):
    """Everything `echo2-node learn` needs."""

    run: RunSection = RunSection()
    model: ModelSection
    task: TaskSection
    rollout: RolloutSection = RolloutSection()
    staleness: StalenessSection = StalenessSection()
    learner: LearnerSection = LearnerSection()
    mesh: MeshSection = MeshSection()
    weights: WeightsSection = WeightsSection()


class ActorConfig(Section, frozen=True, kw_only=True):
    """What `echo2-node join` needs beside the ticket; every field is an option of the command."""

    name: Annotated[str, Meta(max_length=64)] = ""
    """What others' tables call this node."""
    engine: str = "torch"
    """What generates: torch, or vllm where that extra is installed."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: the GPU where there is one."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 on a GPU, float32 on a CPU."""
    threads: NonNegative = 0
    """Threads for computing; 0 chooses from the cores, 1 on small hosts."""
    sequences_max: Positive = 64
    """Sequences decoded at once."""
    groups_in_flight_max: Annotated[int, Meta(ge=1, le=limits.LEASES_PER_GRANT_MAX)] = 8
    """Prompt groups held at once."""
    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    """Empty: dial out only."""
    announce: tuple[str, ...] = ()
    """What to tell others instead of the addresses listened on."""
    mdns: bool = True
    """Find nodes on the local network."""
    relay: bool = True
    """Carry connections for nodes behind NATs, within limits, if this one can be dialled."""
    bulk_listen: tuple[str, ...] = ()
    """Where weights are served, beside `listen`; empty: the same hosts on a free port."""
    bulk_announce: tuple[str, ...] = ()
    """What to tell others instead, where that port is forwarded too."""
    uplink_mbit_per_s: Annotated[float, Meta(ge=0.0)] = 0.0
    """Cap of weights sent; 0 for none."""
    downlink_mbit_per_s: Annotated[float, Meta(ge=0.0)] = 0.0
    """Cap of weights received; 0 for none."""
    versions_kept: Annotated[int, Meta(ge=1, le=limits.SHELF_VERSIONS_MAX)] = limits.KEPT_VERSIONS
    """Whole versions of the weights that stay on disk."""
    store_quota_bytes: Positive = limits.STORE_QUOTA_BYTES_DEFAULT
    """Disk for weights and rollouts; the least recently used goes first."""
    drain_s: Seconds = 20.0
    """On SIGTERM: how long running generations may take before their leases are handed back."""


def bulk_settings(config: MeshSection | ActorConfig) -> BulkSettings:
    """The bulk port as the mesh wants it."""
    return BulkSettings(
        listen=config.bulk_listen or None,
        announce=config.bulk_announce,
        uplink_bytes_per_s=config.uplink_mbit_per_s * 1e6 / 8,
        downlink_bytes_per_s=config.downlink_mbit_per_s * 1e6 / 8,
    )


def load_run(path: Path, overrides: tuple[str, ...] = ()) -> RunConfig:
    """Read a run file.

    Args:
        path: a TOML file.
        overrides: `section.key=value`, value in TOML syntax (a bare word is a string).

    Raises:
        UsageError: no such file, not TOML, an unknown key (with the nearest known one), a value
            of the wrong type or out of bounds (with its path).
    """
    try:
        data = msgspec.toml.decode(path.read_bytes())
    except FileNotFoundError as error:
        raise UsageError(
            f"There is no run file at {path}.", "Examples to start from lie in `runs/`."
        ) from error
    except OSError as error:
        raise UsageError(f"The run file {path} cannot be read: {error.strerror}.") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{path} is not TOML: {error}.", "Mend that line and try again."
        ) from error
    for override in overrides:
        _apply(data, override)
    config: RunConfig = convert(data, RunConfig, where=str(path))
    _check(config, where=str(path))
    model = Path(config.model.path)
    if not model.is_absolute():
        near = (path.parent / model).resolve()
        if near.exists() and not model.exists():
            model = near
        config = msgspec.structs.replace(
            config, model=msgspec.structs.replace(config.model, path=str(model.absolute()))
        )
    return config


_EVERY_SETTING = "`runs/settings.md` lists every setting with its bounds, default and meaning."


def convert(data: object, kind: type[Any], *, where: str, hint: str = _EVERY_SETTING) -> Any:
    """`data` as `kind`, or a UsageError that names the path of what is wrong in `where`."""
    _refuse_unknown_keys(data, kind, (), where)
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        text = str(error)
        problem, _, at = text.partition(" - at ")
        key = at.strip("`").removeprefix("$.").removeprefix("$") or "the top level"
        words = _choices(kind, key)
        raise UsageError(
            f"{where}: {key}: {problem[:1].lower()}{problem[1:]}.",
            (f"It may be {', '.join(words)}. " if words else "") + hint,
        ) from error


def _check(config: RunConfig, *, where: str) -> None:
    """Relations between settings.

    A version is used by actors until the next is published; its last rollouts are kappa - 1 steps
    old at least when their turn comes. Above S + 1 none would be admitted and the run would stop.
    """
    staleness = config.staleness
    if staleness.kappa_steps > staleness.limit_steps + 1:
        raise UsageError(
            f"{where}: staleness.publish_every_steps is {staleness.kappa_steps}, above "
            f"staleness.limit_steps + 1 = {staleness.limit_steps + 1}: every rollout would be "
            "stale before the next version.",
            "Publish more often or allow more staleness.",
        )
    if config.mesh.chunk_size_bytes > config.mesh.store_quota_bytes:
        raise UsageError(
            f"{where}: mesh.store_quota_bytes is {config.mesh.store_quota_bytes}, less than one "
            f"chunk of mesh.chunk_size_bytes = {config.mesh.chunk_size_bytes}.",
            "Give the store room for at least two versions of the model.",
        )


def dump(config: Section) -> str:
    """The resolved configuration as TOML, as `--dry-run` prints it."""
    return msgspec.toml.encode(config).decode()


def _apply(data: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    path = key.strip().split(".")
    if not equals or not all(path):
        raise UsageError(
            f"'{override}' is not an override.", "Write section.key=value, e.g. learner.lr=1e-5."
        )
    try:
        value = msgspec.toml.decode(f"value = {text}")["value"]
    except msgspec.DecodeError:
        value = text
    table = data
    for part in path[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise UsageError(f"'{override}': {part} is a value, not a table.")
    table[path[-1]] = value


def _refuse_unknown_keys(data: object, kind: object, path: tuple[str, ...], where: str) -> None:
    """A misspelt key, at any depth, with the nearest known key."""
    kind = _struct_in(kind)
    if kind is None or not isinstance(data, dict):
        return
    hints = get_type_hints(kind)
    for key, value in data.items():
        if key not in hints:
            near = difflib.get_close_matches(key, hints, n=1)
            raise UsageError(
                f"{where}: there is no setting '{'.'.join((*path, key))}'.",
                f"Did you mean '{'.'.join((*path, near[0]))}'?"
                if near
                else f"Known here: {', '.join(hints)}.",
            )
        _refuse_unknown_keys(value, hints[key], (*path, key), where)


def _struct_in(kind: object) -> type[msgspec.Struct] | None:
    if get_origin(kind) in (Union, types.UnionType, Annotated):
        return next((s for s in map(_struct_in, get_args(kind)) if s is not None), None)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return kind
    return None


def _choices(kind: type[Any], key: str) -> tuple[str, ...]:
    """The words that the setting at `key` may have; none where it is no choice of words."""
    hint: Any = kind
    for part in key.split("."):
        inner = _struct_in(hint)
        hint = get_type_hints(inner).get(part) if inner is not None else None
    parts = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return tuple(
        str(word) for part in parts if get_origin(part) is Literal for word in get_args(part)
    )
