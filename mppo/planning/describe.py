"""The dry run as text: the plan, who is where in which phase, and the verdict."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mppo.planning.checkpoint_space import describe_checkpoints
from mppo.planning.fit import Fit, plan_fit, planned_gpu
from mppo.planning.host import HostNeed, host_need, planned_host_issue
from mppo.planning.memory import transformer_engine_is_installed
from mppo.planning.peaks import RankUse
from mppo.planning.residency import ON_DEVICE, Part, Place, role_parts
from mppo.planning.run_plan import RolePlan, plan_roles, with_token_budgets
from mppo.planning.schedule_time import TrainedRole, describe_schedule
from mppo.planning.time.picture import draw_step
from mppo.planning.time.search import Search, describe_search
from mppo.planning.time.step_text import TimeOptions, Timing, columns, describe_prediction
from mppo.planning.token_budgets import given_budgets
from mppo.planning.verdict import Moment, describe_verdict
from mppo.recipe.gpu_types import GIB
from mppo.recipe.load import resolved_yaml
from mppo.recipe.schema import Recipe
from mppo.recipe.sections.megatron import Offload
from mppo.recipe.sections.role_config import RoleConfig
from mppo.report.residency_bars import PhaseBars, draw_residency

RANKS_SHOWN = 64


@dataclass(frozen=True)
class RunPlan:
    """The plan of a run; as text it is what ``mppo-plan`` prints.

    Args:
        host_issue: why the run does not fit its hosts; None: it does.
    """

    recipe: Recipe
    fit: Fit
    text: str
    host_issue: str | None
    plans: Sequence[RolePlan]
    world_size: int
    hf_configs: Mapping[str, Any]

    @property
    def fits(self) -> bool:
        return self.fit.verdict.fits and self.host_issue is None

    @property
    def verdict(self) -> str:
        found = describe_verdict(self.fit.verdict)
        return found if self.host_issue is None else f"{found}\n{self.host_issue}"

    @property
    def memory(self) -> dict[str, dict[str, float]]:
        """GiB on the GPU of the rank with the largest moment: by phase, of each role's parts,
        ``passes`` (activations and buffers), ``engine`` and ``contexts``."""
        found: dict[str, dict[str, float]] = {}
        for bars in residency_bars(self.fit):
            sizes = found.setdefault(bars.phase, {})
            for name, size in bars.device.items():
                purpose = name.partition(" ")[0]
                sizes[purpose] = sizes.get(purpose, 0.0) + size / GIB
        return found

    def timing(self, options: TimeOptions) -> Callable[[], str]:
        """Check the options; return a function that predicts, draws and searches as far as asked,
        and describes it. ConfigError if an option is wrong, or the library is missing."""
        timing = Timing.of(self.recipe, self.fit.gpu, options)
        return lambda: self._predicted(timing)

    def _predicted(self, timing: Timing) -> str:
        load, prediction = timing.predict(self.recipe, self.plans, self.fit, self.hf_configs)
        options = timing.options
        parts = [describe_prediction(load, prediction, options.price)]
        if options.picture is not None:
            title = f"{self.recipe.trainer.experiment_name}, {self.fit.gpu.name}"
            draw_step(title, prediction, self.world_size, options.picture)
            parts.append(f"drawn: {options.picture}")
        if options.search is not None:
            layouts = (self.world_size, self.hf_configs, self.fit.gpu)
            found = Search(self.recipe, *layouts, timing.sequences, timing.kernels).best()
            parts.append(describe_search(found))
            if found.recipe is None:
                parts.append(f"not written: {options.search}, because nothing fits")
            else:
                options.search.write_text(resolved_yaml(found.recipe))
                parts.append(f"written: {options.search}")
        return "\n\n".join(parts)

    def __str__(self) -> str:
        return self.text


def plan_run(
    recipe: Recipe, world_size: int, hf_configs: Mapping[str, Any], gpu: str | None = None
) -> RunPlan:
    """Plan a run: who is where in which phase, and the verdict. ``gpu``: its name or its memory in
    GiB; None: the recipe's, or the default. ConfigError if there is no such GPU."""
    device = planned_gpu(recipe, gpu)
    plans = plan_roles(recipe, world_size, hf_configs)
    fit = plan_fit(recipe, plans, device)
    need = host_need(recipe, plans, fit)
    issue = planned_host_issue(need, recipe)
    steps = recipe.trainer.total_training_steps
    parts = [
        f"{_in_short(fit, issue is None, world_size)}\n",
        describe_plan(recipe, world_size, hf_configs),
        describe_fit(plans, fit, need),
        *([str(issue)] if issue else []),
        f"\n# checkpoints\n{describe_checkpoints(recipe, plans, steps)}",
    ]
    host_issue = str(issue) if issue else None
    return RunPlan(recipe, fit, "\n".join(parts), host_issue, plans, world_size, hf_configs)


def _in_short(fit: Fit, hosts_fit: bool, world_size: int) -> str:
    verdict, where = fit.verdict, f"{world_size} x {fit.gpu.name}"
    if verdict.fits and hosts_fit:
        return f"verdict: {describe_verdict(verdict).splitlines()[-1]}: {where}"
    what = "the GPU's memory" if not verdict.fits else "the host's memory"
    return f"verdict: too large for {where}: {what}; the plan ends with what would help"


def draw_plan(plan: RunPlan, picture: Path) -> None:
    """Draw who is where in which phase into a file, and print its name."""
    fit = plan.fit
    title = f"{plan.recipe.trainer.experiment_name}, rank {fit.tightest}, {fit.gpu.name}"
    draw_residency(title, residency_bars(fit), fit.gpu.nbytes, picture)
    print(f"\ndrawn: {picture}")


def describe_plan(recipe: Recipe, world_size: int, hf_configs: Mapping[str, Any]) -> str:
    """The plan as text: layouts, micro-batches, parameters and what they take."""
    plans = plan_roles(recipe, world_size, hf_configs)
    budgets = given_budgets(with_token_budgets(recipe, world_size, hf_configs))
    parts = [
        f"# layout of {world_size} ranks\n" + _layouts(plans),
        "# where each rank sits\n" + _ranks(plans, world_size),
        "# one iteration\n" + _iteration(recipe, plans),
        "# schedule of an update\n" + _schedule(recipe, plans, budgets),
        "# parameters and estimated memory per GPU\n" + _parameters(plans),
    ]
    return "\n\n".join(parts) + "\n"


def _layouts(plans: list[RolePlan]) -> str:
    rows: list[tuple[str, ...]] = [
        ("role", "layout", "TP", "PP", "VPP", "CP", "DP", "EP", "ETP", "EDP")
    ]
    for plan in plans:
        layout = plan.layout
        sizes = (layout.tp, layout.pp, layout.vpp, layout.cp, layout.dp, layout.ep, layout.etp)
        rows.append((plan.role.name, layout.describe(), *map(str, (*sizes, layout.edp))))
    return columns(rows)


def _ranks(plans: list[RolePlan], world_size: int) -> str:
    rows: list[tuple[str, ...]] = [("rank", *(plan.role.name for plan in plans))]
    for rank in range(min(world_size, RANKS_SHOWN)):
        cells: list[str] = []
        for plan in plans:
            at = plan.layout.coordinates(rank)
            cell = f"tp{at.tp} cp{at.cp} dp{at.dp} pp{at.pp}"
            experts = plan.layout.ep > 1 or plan.layout.etp not in (1, plan.layout.tp)
            cells.append(f"{cell} etp{at.etp} ep{at.ep}" if experts else cell)
        rows.append((str(rank), *cells))
    text = columns(rows)
    if world_size > RANKS_SHOWN:
        text += f"\n... and {world_size - RANKS_SHOWN} more ranks in the same order"
    return text


def _iteration(recipe: Recipe, plans: list[RolePlan]) -> str:
    sequences = recipe.data.train_batch_size * recipe.rollout.n
    longest = recipe.data.max_prompt_length + recipe.data.max_response_length
    lines = [
        f"{recipe.data.train_batch_size} prompts x {recipe.rollout.n} samples = {sequences} "
        f"sequences of at most {longest} tokens; the numbers below are for sequences of that length"
    ]
    rows: list[tuple[str, ...]] = [
        ("role", "optimizer steps", "micro-batches per rank", "tokens each", "bubble")
    ]
    for plan in plans:
        steps = str(plan.mini_batches) if plan.mini_batches else "frozen"
        tokens = f"<= {plan.micro_batch_tokens:,}"
        share = f"{plan.layout.bubble_fraction(plan.micro_batches):.0%}"
        rows.append((plan.role.name, steps, str(plan.micro_batches), tokens, share))
    return "\n".join([*lines, columns(rows)])


def _schedule(recipe: Recipe, plans: list[RolePlan], budgets: Mapping[str, int | None]) -> str:
    """The schedule; a pass costs in proportion to parameters and tokens."""
    roles = [
        TrainedRole(
            plan.role.name,
            plan.layout,
            plan.mini_batches,
            plan.micro_batches,
            plan.parameters * plan.micro_batch_tokens,
            plan.role.megatron.recompute_granularity == "full",
        )
        for plan in reversed(plans)
        if plan.mini_batches
    ]
    text = describe_schedule(recipe, roles)
    if None not in given_budgets(recipe).values():
        return text
    numbers = ", ".join(
        f"{name} {budgets[name]:,}" + (" (auto)" if given is None else "")
        for name, given in given_budgets(recipe).items()
    )
    return f"{text}\ntokens per GPU of a micro-batch, for passes of equal cost: {numbers}"


def _parameters(plans: list[RolePlan]) -> str:
    rows: list[tuple[str, ...]] = [
        ("role", "parameters", "on one GPU", "weights", "gradients", "optimizer", "sum")
    ]
    for plan in plans:
        stage = max(range(plan.layout.pp), key=lambda s: plan.memory[s].resident)
        part = plan.memory[stage]
        sizes = (part.weights, part.gradients, part.optimizer, part.resident)
        rows.append(
            (
                plan.role.name,
                f"{plan.parameters:,}",
                f"{plan.stage_parameters[stage]:,}",
                *map(_gib, sizes),
            )
        )
    lines = [columns(rows)]
    latent = any(plan.layout.tp > 1 and plan.passes[0].kind.shape.mla for plan in plans)
    if latent and not transformer_engine_is_installed():
        lines.append(
            "Transformer Engine is not installed here; with it, every tensor-parallel rank holds "
            "latent attention's down projections complete"
        )
    return "\n".join(lines)


def describe_fit(plans: Sequence[RolePlan], fit: Fit, need: HostNeed) -> str:
    """Memory of GPUs and hosts by phase, who is where, and the verdict."""
    chosen = "; ".join(
        f"{plan.role.name} {_offloaded(plan.role, fit.offload[plan.role.name])}" for plan in plans
    )
    parts = ", ".join(f"{name} {_gib(size)}" for name, size in need.parts.items())
    return "\n\n".join(
        [
            f"# memory by phase on {fit.gpu.name} ({_gib(fit.gpu.nbytes)})\noffloaded: {chosen}",
            _peaks(fit),
            f"# who is where in which phase, rank {fit.tightest}, GiB\n{_places(fit)}",
            f"host memory of a node: {_gib(need.total)}: {parts}",
            f"# verdict\n{describe_verdict(fit.verdict)}",
        ]
    )


def _offloaded(role: RoleConfig, offload: Offload) -> str:
    parts = ", ".join(part for part in role_parts(role) if getattr(offload, part))
    return (parts or "nothing") + (" (auto)" if role.megatron.offload == "auto" else "")


def _peaks(fit: Fit) -> str:
    """Peaks of a rank on the first stage, on the last, and of the one with the largest peak."""
    shown = sorted({min(fit.uses), fit.tightest, max(fit.uses)})
    uses = [fit.uses[rank] for rank in shown]
    rows: list[tuple[str, ...]] = [("peak of a GPU", *(f"rank {rank}" for rank in shown))]
    for phases in zip(*(use.uses for use in uses), strict=True):
        sizes = [_gib(use.peak(one, fit.table)) for use, one in zip(uses, phases)]
        rows.append((phases[0].name, *sizes))
    rows.append(("CUDA context and NCCL", *(_gib(use.outside) for use in uses)))
    return columns(rows)


def _places(fit: Fit) -> str:
    use = fit.uses[fit.tightest]
    heads = ("phase", *use.parts, "passes, buffers", "engine", "contexts, NCCL", "sum", "host")
    rows: list[tuple[str, ...]] = [heads]
    for phase, places in fit.table.items():
        largest = use.largest(phase)
        moment = fit.moment(fit.tightest, largest.name)
        cells = [_role_cell(use, name, places[name]) for name in use.parts]
        extra = largest.extra + use.buffers
        host = sum(_parts_at(use, places, ("host",)).values())
        sizes = (extra, _engine_bytes(moment), use.outside, moment.total, host)
        rows.append((phase, *cells, *(f"{size / GIB:.2f}" for size in sizes)))
    legend = (
        "P parameters, G gradients, O optimizer: on the GPU; p, o: they come back for the next "
        "phase.\nThe others are in host memory; gradients are freed."
    )
    return f"{columns(rows)}\n{legend}"


def residency_bars(fit: Fit) -> list[PhaseBars]:
    """Memory of the rank with the largest moment, by phase, for a picture."""
    use = fit.uses[fit.tightest]
    bars: list[PhaseBars] = []
    for phase, places in fit.table.items():
        largest = use.largest(phase)
        moment = fit.moment(fit.tightest, largest.name)
        device = {
            **_parts_at(use, places, ON_DEVICE),
            "passes": largest.extra + use.buffers,
            "engine": _engine_bytes(moment),
            "contexts": use.outside,
        }
        bars.append(PhaseBars(phase, device, _parts_at(use, places, ("host",))))
    return bars


def _parts_at(
    use: RankUse, places: Mapping[str, Mapping[Part, Place]], where: Sequence[Place]
) -> dict[str, int]:
    return {
        f"{name} {part}": size
        for name, parts in use.parts.items()
        for part, size in parts.items()
        if places[name][part] in where
    }


def _engine_bytes(moment: Moment) -> int:
    return sum(n for name, n in moment.beside.items() if name.startswith(("engine", "KV")))


def _role_cell(use: RankUse, name: str, places: Mapping[Any, str]) -> str:
    """A role's parts on the GPU with their GiB."""
    here = [
        f"{part[0].upper() if places[part] == 'device' else part[0]} {size / GIB:.2f}"
        for part, size in use.parts[name].items()
        if places[part] in ON_DEVICE
    ]
    return " ".join(here) or "-"


def _gib(count: int) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB / 100 else f"{count / 1024**2:.2f} MiB"
