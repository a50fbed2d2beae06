"""Batch scripts: golden files, shipped sizes, and the options that a script contains."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from relax_hpc.base.errors import ConfigError
from relax_hpc.cluster.slurm.layout import components, gpu_hours
from relax_hpc.cluster.slurm.render import render, render_group, templates
from relax_hpc.commands import submit as submit_command
from relax_hpc.config import load, resolve
from relax_hpc.config.yaml_files import dump_yaml, parse_yaml
from relax_hpc.ops.checks.settings import check
from tests.helpers.cluster_sizes import (
    FOUR_NODES,
    ROOT,
    SITES,
    SIZES,
    compose,
    gpus_of,
    nodes_of,
    sizes_of,
)
from tests.helpers.model_files import model_directory
from tests.requirements import requires

GOLDEN = ROOT / "tests" / "golden"
UPDATE = os.environ.get("RELAX_UPDATE_GOLDEN") == "1"
"""Write the golden files instead of comparing. Read the difference before you commit it."""
CASES: list[tuple[Path, str, Path | None]] = []
for size in SIZES:
    layouts = ("local",) if nodes_of(size) == 1 else ("het", "jobs")
    CASES += [(size, layout, None) for layout in layouts]
for site in SITES:
    CASES += [(size, "het", site) for size in sizes_of(site) if nodes_of(size) == 8][:1]


def join_scripts(text: dict[str, str]) -> str:
    return "\n".join(f"==> {name} <==\n{script}" for name, script in text.items())


@cache
def rendered(size: Path, layout: str, site: Path | None) -> dict[str, str]:
    return render(compose(size, layout, site))


@pytest.mark.parametrize(
    ("size", "layout", "site"),
    CASES,
    ids=lambda v: v.stem if isinstance(v, Path) else str(v or "any"),
)
def test_scripts_equal_golden_files(size: Path, layout: str, site: Path | None) -> None:
    path = GOLDEN / f"{'-'.join([size.stem, layout, *([site.stem] if site else [])])}.txt"
    text = join_scripts(rendered(size, layout, site))
    if UPDATE:
        path.write_text(text)
    assert path.read_text() == text, (
        "if intended: RELAX_UPDATE_GOLDEN=1 pytest tests/cluster/test_render.py"
    )


def test_each_golden_file_has_a_case() -> None:
    names = {
        "-".join([size.stem, layout, *([site.stem] if site else [])])
        for size, layout, site in CASES
    }
    assert {path.stem for path in GOLDEN.glob("*.txt")} == names


def test_shipped_scripts_are_up_to_date() -> None:
    check = subprocess.run(
        [sys.executable, ROOT / "tools" / "render_templates.py", "--check"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (check.returncode, check.stdout) == (0, ""), "run python tools/render_templates.py"
    assert {path.stem for path in (ROOT / "slurm").glob("*.sbatch")} == {
        path.stem for path in SIZES
    }


def test_templates_are_short() -> None:
    files = list(templates().glob("*.j2"))
    assert files and all(len(file.read_text().splitlines()) <= 60 for file in files)


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("scripts")
    paths = sorted((ROOT / "slurm").glob("*.sbatch"))
    for number, case in enumerate(CASES):
        for name, text in rendered(*case).items():
            path = folder / f"{number}-{name}"
            path.write_text(text)
            paths.append(path)
    return paths


def test_every_script_is_valid_bash(scripts: list[Path]) -> None:
    for script in scripts:
        subprocess.run(["bash", "-n", script], check=True, timeout=10)


def test_shellcheck_finds_nothing(scripts: list[Path]) -> None:
    requires("shellcheck")
    check = subprocess.run(["shellcheck", *scripts], capture_output=True, text=True, timeout=120)
    assert (check.returncode, check.stdout) == (0, "")


SHAPE = {
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 12288,
}
EXPERTS = {
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 8,
    "tie_word_embeddings": False,
}
EXPERTS |= {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}


@pytest.fixture
def model(size: Path, tmp_path: Path) -> Path:
    """Configuration files of a model of 8B parameters, or of a model with experts if `size` is for
    these; and a data file. `check` needs no weights."""
    path = model_directory(
        tmp_path / "model", **SHAPE, **(EXPERTS if size.stem.endswith("-moe") else {})
    )
    (path / "train.jsonl").write_text('{"id": 1, "prompt": "12", "answer": "12"}\n')
    return path


@pytest.mark.parametrize("size", SIZES, ids=lambda path: path.stem)
def test_a_size_has_the_nodes_of_its_name_and_no_findings(size: Path, model: Path) -> None:
    # A site, so that one node is a job's and not this machine.
    run = {
        "run_dir": str(model / "run"),
        "model.path": str(model),
        "data.train": str(model / "train.jsonl"),
    }
    run |= {"site.name": "cluster", "rollout.reward": "math"}
    config = resolve(load([size], run))
    assert check(config) == []
    nodes, gpus = nodes_of(size), gpus_of(size)
    with_gpus = [component for component in components(config) if component.gpus_per_node]
    assert sum(component.nodes for component in with_gpus) == nodes
    assert gpu_hours(config) == nodes * gpus * 24
    assert all(component.memory for component in components(config)), (
        "the site's default is unknown"
    )
    tp = config.rollout.engine.flags.get("tp_size", 1)
    (rollout,) = (group.resources for group in config.groups.values() if "rollout" in group.roles)
    assert config.rollout.replicas * tp == rollout.nodes * rollout.gpus_per_node
    assert all(
        component.tasks_per_node * component.cpus_per_task <= 8 * gpus
        for component in components(config)
    )


@pytest.mark.parametrize("size", SIZES, ids=lambda path: path.stem)
def test_the_kl_comment_of_a_size_is_valid(size: Path, model: Path) -> None:
    """Each size has a comment with the layer for a run with a reference model."""
    (comment,) = (
        line
        for line in size.read_text().splitlines()
        if line.startswith("# With a KL in the loss: ")
    )
    # A site, so that one node is a job's and not this machine.
    run = {
        "run_dir": str(model / "run"),
        "model.path": str(model),
        "data.train": str(model / "train.jsonl"),
    }
    run |= {"site.name": "cluster", "rollout.reward": "math"}
    layer = parse_yaml(comment.partition("loss: ")[2], "comment") | {
        "algorithm": {"kl": {"coefficient": 0.1}}
    }
    with_kl = model / f"{size.stem}.yaml"
    with_kl.write_text(dump_yaml(layer))
    config = resolve(load([size, with_kl], run))
    assert check(config) == []
    assert gpu_hours(config) == nodes_of(size) * gpus_of(size) * 24
    assert all(
        component.tasks_per_node * component.cpus_per_task <= 8 * gpus_of(size)
        for component in components(config)
    )


@pytest.mark.parametrize("site", SITES, ids=lambda path: path.stem)
def test_example_sites_fit_their_sizes_and_are_marked_untested(site: Path) -> None:
    text = site.read_text()
    assert "UNTESTED" in text and "placeholder" in text
    for size in sizes_of(site):
        config = compose(size, "local" if nodes_of(size) == 1 else "jobs", site)
        assert all(group.roles for group in config.groups.values()), (
            "a site must not restore a removed group"
        )
        assert render(config)


@pytest.mark.parametrize("site", SITES, ids=lambda path: path.stem)
def test_a_dry_run_writes_the_scripts_of_every_site(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Other tests copy the code, which takes longer than the rest.
    monkeypatch.setattr(submit_command, "take_snapshot", lambda run: run.submit.mkdir())
    size = next(size for size in sizes_of(site) if nodes_of(size) == 4)
    model = model_directory(tmp_path / "model", **SHAPE)
    (model / "train.jsonl").write_text('{"id": 1, "prompt": "12", "answer": "12"}\n')
    values = {"model.path": str(model), "data.train": str(model / "train.jsonl")}
    values |= {"rollout.reward": "math", "run_dir": str(tmp_path / "run")}
    config = compose(size, "jobs", site, **values)
    assert submit_command.submit(config, resume=False, dry_run=True) == 0
    scripts = sorted(path.stem for path in (tmp_path / "run/submit").glob("*.sbatch"))
    assert scripts == sorted(config.groups)


def test_a_site_file_with_an_unknown_key_is_refused(tmp_path: Path) -> None:
    site = tmp_path / "site.yaml"
    site.write_text("site:\n  name: here\n  partitoin: gpu\n")
    command = [sys.executable, "-m", "relax_hpc", "submit", "--config", str(FOUR_NODES)]
    command += ["--config", str(site), "--run_dir", str(tmp_path / "run")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    lines = [line for line in result.stderr.splitlines() if "partitoin" in line]
    assert result.returncode == 78 and len(lines) == 1, result.stderr
    assert f"{site}:3" in lines[0] and "partition" in lines[0]
    assert not (tmp_path / "run").exists()


# -- options in a script ---------------------------------------------------------------------------


def lines(text: str, option: str) -> list[str]:
    """Directives of a script whose option begins with `option`."""
    return [
        line.removeprefix("#SBATCH ")
        for line in text.splitlines()
        if line.startswith(f"#SBATCH --{option}")
    ]


def test_only_jobs_of_groups_are_requeued() -> None:
    het = render(compose(FOUR_NODES, "het"))["run.sbatch"]
    assert het.count("#SBATCH hetjob\n") == 2
    assert len(lines(het, "no-kill")) == len(lines(het, "no-requeue")) == 3
    assert lines(het, "requeue") == []
    assert lines(het, "signal") == ["--signal=B:USR2@300"], (
        "one directive: Slurm signals only the batch script"
    )
    jobs = render(compose(FOUR_NODES, "jobs"))
    assert list(jobs) == ["hub.sbatch", "rollout.sbatch", "actor.sbatch"]
    for group, text in ((name.removesuffix(".sbatch"), text) for name, text in jobs.items()):
        assert (len(lines(text, "requeue")), lines(text, "no-")) == (1, [])
        assert text.endswith(f"relax_hpc.commands.head --run_dir /scratch/demo --group {group}\n")


def test_a_hub_of_two_nodes_survives_loss_of_a_node() -> None:
    jobs = render(
        compose(
            FOUR_NODES,
            "jobs",
            **{"groups.hub.resources.nodes": 2, "groups.actor.resources.nodes": 2},
        )
    )
    assert [name for name, text in jobs.items() if lines(text, "no-kill")] == ["hub.sbatch"]
    assert all(lines(text, "requeue") for text in jobs.values())


def test_a_separate_job_of_a_het_run_is_requeued() -> None:
    text = render_group(compose(FOUR_NODES, "het"), "rollout-2")
    assert (lines(text, "requeue"), lines(text, "no-kill")) == (["--requeue"], [])
    assert lines(text, "nodes") == ["--nodes=3"] and "hetjob" not in text
    assert lines(text, "job-name") == ["--job-name=rollout-2-demo"]
    assert text.endswith("--run_dir /scratch/demo --group rollout-2\n")


def test_gpus_are_requested_in_the_form_of_the_site() -> None:
    def gpu_options(request: str, kind: str, options: dict[str, str]) -> list[str]:
        config = compose(FOUR_NODES, "jobs", **{"site.gpu_request": request, "site.gpu_type": kind})
        config.groups["actor"].resources.options = options
        text = render_group(config, "actor")
        return lines(text, "gpus") + lines(text, "gres")

    assert gpu_options("gpus_per_node", "", {}) == ["--gpus-per-node=8"]
    assert gpu_options("gpus_per_node", "h100", {"gres": "tmp:1"}) == [
        "--gpus-per-node=h100:8",
        "--gres=tmp:1",
    ]
    assert gpu_options("gres", "", {}) == ["--gres=gpu:8"]
    assert gpu_options("gres", "a100", {"gres": "tmp:1"}) == ["--gres=gpu:a100:8,tmp:1"]
    assert gpu_options("none", "a100", {}) == []


def test_flags_memory_and_other_options() -> None:
    config = compose(
        FOUR_NODES,
        "jobs",
        **{"site.options": {"mem": "0", "exclusive": "", "mail-user": "me@there"}},
    )
    config.groups["actor"].resources.memory = "64G"
    config.groups["actor"].resources.options = {"exclude": "node[1-2],x3", "mail-type": "END"}
    text = render_group(config, "actor")
    for line in (
        "--mem=64G",
        "--exclusive",
        "--mail-user=me@there",
        "--exclude=node[1-2],x3",
        "--mail-type=END",
    ):
        assert f"#SBATCH {line}\n" in text
    config.groups["rollout"].resources.memory = ""
    config.site.options |= {"mem-per-gpu": "9G"}
    memory_options = {
        group: lines(render_group(config, group), "mem") for group in ("actor", "hub", "rollout")
    }
    assert memory_options == {
        "actor": ["--mem=64G"],
        "hub": ["--mem=16G"],
        "rollout": ["--mem=0", "--mem-per-gpu=9G"],
    }
    config.site.memory_request = "none"
    assert lines(render_group(config, "hub"), "mem=") == ["--mem=0"], (
        "memory_request does not change options of the site"
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"run_dir": "runs/demo"},
            "run_dir: found 'runs/demo', allowed in a batch script: an absolute path",
        ),
        ({"run_dir": "/a%j"}, r"run_dir: found '/a%j', allowed: no % and no"),
        ({"run_dir": "/a\n#SBATCH --nodes=99"}, "run_dir: .*no line breaks or control characters"),
        ({"name": "a\nb"}, "name: .*no line breaks"),
        ({"site.partition": "a\rb"}, "partition: .*no line breaks"),
        (
            {"site.options": {"--qos": "a"}},
            "site.options: found '--qos': 'a', allowed: the long name",
        ),
        ({"site.options": {"no-requeue": ""}}, "site.options.no-requeue: .*set layout instead"),
        ({"site.options": {"array": "1-3"}}, "site.options.array: .*it cannot be changed"),
        ({"site.env": {"A=1;B": "x"}}, "site.env: found 'A=1;B', allowed: names of letters"),
        (
            {"groups": {"actor": {"resources": {"memory": "all"}}}},
            "groups.actor.resources.memory: found 'all'",
        ),
    ],
)
def test_an_invalid_value_has_an_error_with_a_fix(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        render(compose(FOUR_NODES, "het", **overrides))


MANY_ERRORS = {
    "run_dir": "/a%j",
    "name": "a\nb",
    "site.options": {"--qos": "a", "no-requeue": "", "chdir": "/"},
    "site.srun_options": {"mpi": "none", "-x": "1"},
    "site.env": {"A=1": "x", "B;": "x"},
    "site.container": {"runtime": "apptainer", "mounts": ["a", "b,c"]},
    "site.mpi.launcher": "pmix",
    "data.train": "/a:b/train.jsonl",
    "groups": {
        "actor": {"resources": {"memory": "all"}},
        "rollout": {"resources": {"memory": "2 G"}},
    },
}


@pytest.mark.parametrize("layout", ["het", "jobs"])
def test_all_invalid_values_are_reported_together(layout: str) -> None:
    with pytest.raises(ConfigError) as caught:
        render(compose(FOUR_NODES, layout, **MANY_ERRORS))
    keys = sorted(mistake.partition(": ")[0] for mistake in caught.value.mistakes)
    assert keys == [
        "groups.actor.resources.memory", "groups.rollout.resources.memory", "name",
        "run_dir", "site.container.image",
        "site.container.mounts", "site.container.mounts", "site.container.runtime", "site.env", "site.env",
        "site.mpi.launcher", "site.options", "site.options.chdir", "site.options.no-requeue", "site.srun_options", "site.srun_options.mpi",
    ]  # fmt: skip
    with pytest.raises(
        ConfigError, match=r"site\.container\.image: found nothing with runtime pyxis"
    ):
        render(compose(FOUR_NODES, layout, **{"site.container.runtime": "pyxis"}))


@pytest.mark.parametrize("layout", ["het", "jobs", "local"])
def test_all_conflicts_with_a_layout_are_reported_together(layout: str) -> None:
    job_time = {"time": "soon"} if layout == "jobs" else {}
    groups = {
        "actor": {"resources": {"nodes": 3, **job_time}},
        "rollout": {"env": {"CUDA_VISIBLE_DEVICES": "0"}},
    }
    with pytest.raises(ConfigError) as caught:
        render(
            compose(
                FOUR_NODES,
                layout,
                groups=groups,
                **{"rollout.replicas": 7, "slurm.time": "5", "slurm.signal_s": 300},
            )
        )
    keys = [mistake.partition(": ")[0] for mistake in caught.value.mistakes]
    expected = {"slurm.signal_s"} | ({"groups.actor.resources.time"} if layout == "jobs" else set())
    too_many_nodes = {f"groups.{name}.resources.nodes" for name in ("rollout", "actor")}
    uneven_sizes = {
        "rollout.replicas",
        "groups.actor.resources.nodes",
        "groups.rollout.env.CUDA_VISIBLE_DEVICES",
    }
    assert {*keys} >= expected | (too_many_nodes if layout == "local" else uneven_sizes), keys
