"""README, CHANGELOG and docs/: links resolve, examples run, and tables say what the code and the results say."""

from __future__ import annotations

import ast
import importlib.util
import json
import math
import re
import shlex
import struct
import zlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import msa_ops
from msa_ops.contract import _KV_FORMATS_OF_Q, KVFormat
from msa_ops.engines.cuda.plan import SHARED_PER_BLOCK

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
RESULTS = ROOT / "benchmarks" / "results"
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
QUERY_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float8_e4m3fn: "fp8"}


def blocks(page: Path) -> list[tuple[str, str, int]]:
    """Info string, text and line number of a page's fenced blocks."""
    text = page.read_text(encoding="utf-8")
    return [(m[1], m[2], text.count("\n", 0, m.start()) + 2) for m in FENCE.finditer(text)]


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def tables(page: Path) -> list[list[list[str]]]:
    """A page's tables as rows of stripped cells, the heading first and the line under it left out."""
    found: list[list[list[str]]] = [[]]
    for line in prose(page).splitlines():
        if line.startswith("|"):
            found[-1].append([cell.strip() for cell in line.strip().strip("|").split("|")])
        elif found[-1]:
            found.append([])
    return [[rows[0], *rows[2:]] for rows in found if rows]


def table(page: Path, heading: str) -> list[list[str]]:
    """The rows below the heading of the one table whose first heading cell is `heading`."""
    chosen = [rows[1:] for rows in tables(page) if rows[0][0] == heading]
    assert len(chosen) == 1, f"{page.name} has {len(chosen)} tables that begin with {heading!r}"
    return chosen[0]


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ +(.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_resolve(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+://", target):
            continue
        name, _, anchor = target.partition("#")
        linked = page if not name else (page.parent / name).resolve()
        assert linked.exists(), f"{page.name} links to {target}, which is not there"
        assert linked.is_relative_to(ROOT), f"{page.name} links to {target}, outside the project"
        assert not anchor or anchor in anchors(linked), f"{page.name} links to {target}: no such heading"


def test_every_page_is_linked_from_the_readme() -> None:
    """docs/ holds no page that a reader cannot reach."""
    reached = {README.resolve()}
    pending = [README.resolve()]
    while pending:
        page = pending.pop()
        for target in re.findall(r"\]\(([^)\s#]+\.md)[^)]*\)", prose(page)):
            linked = (page.parent / target).resolve()
            if linked not in reached and linked.exists():
                reached.add(linked)
                pending.append(linked)
    assert not {page.resolve() for page in PAGES} - reached


def examples(kind: str) -> list[Any]:
    found = [(page, text, line) for page in PAGES for info, text, line in blocks(page) if info == kind]
    return [pytest.param(*example, id=f"{example[0].name}:{example[2]}") for example in found]


@pytest.mark.parametrize(("page", "text", "line"), examples("python"))
def test_python_examples_run(page: Path, text: str, line: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in a namespace of its own, as it stands. Blocks that cannot run here say so: ``python notest``, and those that
    need a GPU ``python cuda``."""
    if "transformers" in text and importlib.util.find_spec("transformers") is None:
        pytest.skip("needs transformers, which is not installed")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    exec(compile("\n" * (line - 1) + text, str(page), "exec"), {"__name__": "example"})


@pytest.mark.parametrize(("page", "text", "line"), examples("python cuda"))
def test_gpu_examples_are_python(page: Path, text: str, line: int) -> None:
    compile("\n" * (line - 1) + text, str(page), "exec")


@pytest.mark.gpu
@pytest.mark.parametrize(("page", "text", "line"), examples("python cuda"))
def test_gpu_examples_run(page: Path, text: str, line: int) -> None:
    exec(compile("\n" * (line - 1) + text, str(page), "exec"), {"__name__": "example"})


def test_blocks_say_what_they_are() -> None:
    """So that no Python example escapes the test above by its info string."""
    infos = [(page.name, info) for page in PAGES for info, _, _ in blocks(page)]
    assert ("README.md", "python") in infos
    assert [(name, info) for name, info in infos if not info] == []
    unusual = [(name, info) for name, info in infos if info.lower().startswith("py") and info != "python"]
    assert unusual == [("README.md", "python notest"), ("serving.md", "python cuda")]  # the first imports flashinfer
    assert {info for _, info in infos} <= {"sh", "text", "dockerfile", "python", "python notest", "python cuda"}


def shell_commands(program: str) -> list[Any]:
    """What follows `program` in every line of a shell block, or of a Dockerfile, that runs it."""
    found = []
    for page in PAGES:
        for info, text, line in blocks(page):
            if info in ("sh", "dockerfile"):
                for i, words in enumerate(text.splitlines()):
                    for part in words.split("&&"):
                        if match := re.match(rf"(?:\S*=\S+ )*{re.escape(program)} (.*)", part.strip()):
                            arguments = shlex.split(match[1], comments=True)
                            found.append(pytest.param(arguments, id=f"{page.name}:{line + i}"))
    return found


@pytest.mark.parametrize("arguments", shell_commands("msa-ops"))
def test_commands_of_the_pages_exist_with_their_options(arguments: list[str]) -> None:
    """Parsed, not run: an option or a sub-command that is gone is an error."""
    typer_main = pytest.importorskip("typer.main")
    from msa_ops.cli.main import build_app

    command, rest = typer_main.get_command(build_app()), list(arguments)
    name = "msa-ops"
    while hasattr(command, "get_command"):
        name, rest = rest[0], rest[1:]
        command = command.get_command(None, name)
        assert command is not None, f"msa-ops has no {name}"
    command.make_context(name, rest)


@pytest.mark.parametrize("arguments", shell_commands("python3 benchmarks/decode.py"))
def test_benchmark_lines_are_read(arguments: list[str]) -> None:
    from msa_ops.bench.options import parse

    assert parse(arguments).json


def test_shell_commands_are_found() -> None:
    commands = {next(iter(example.values[0])) for example in shell_commands("msa-ops")}
    assert {"doctor", "explain", "bench", "compile"} <= commands


def test_the_readme_example_is_ten_lines() -> None:
    first = next(text for info, text, _ in blocks(README) if info == "python")
    code = [line for line in first.splitlines() if line.strip()]
    assert len(code) <= 10
    assert any("msa_sparse_decode_attention(" in line for line in code)


# --- tables that restate the code --------------------------------------------------------------------------------------


def test_dtype_matrix_is_the_codes() -> None:
    heading = next(rows[0] for rows in tables(README) if rows[0][0] == "q")
    assert heading[-1] == "output"
    formats = [KVFormat(cell.removesuffix(" KV").lower()) for cell in heading[1:-1]]
    assert set(formats) == set(KVFormat)
    want = []
    for dtype, allowed in _KV_FORMATS_OF_Q.items():
        cells = ["CPU, GPU" if f in allowed else "no" for f in formats]
        out = msa_ops.contract._OUT_DTYPE[dtype]
        want.append([QUERY_NAMES[dtype], *cells, QUERY_NAMES[out]])
    assert table(README, "q") == want


def test_dtype_table_of_the_semantics_is_the_codes() -> None:
    names = {
        KVFormat.BF16: "bfloat16",
        KVFormat.FP16: "float16",
        KVFormat.FP8: "float8_e4m3fn",
        KVFormat.NVFP4: "NVFP4",
    }
    want = [
        [str(q).removeprefix("torch."), ", ".join(names[f] for f in allowed), str(out).removeprefix("torch.")]
        for q, allowed, out in ((q, a, msa_ops.contract._OUT_DTYPE[q]) for q, a in _KV_FORMATS_OF_Q.items())
    ]
    assert table(ROOT / "docs" / "semantics.md", "q") == want


def test_device_rows_are_the_codes() -> None:
    rows = {row[0]: row[1] for row in table(README, "device")}

    def formats(cell: str) -> set[KVFormat]:
        return {KVFormat(name.strip().lower()) for name in cell.split(",")}

    assert formats(rows.pop("CPU")) == set(KVFormat)
    assert rows
    listed = [(int(a), int(b)) for device in rows for a, b in re.findall(r"(\d+)\.(\d+)", device)]
    assert sorted(listed) == sorted(SHARED_PER_BLOCK)
    for cell in rows.values():
        assert formats(cell) == set(KVFormat)


def environment_variables_read(source: str) -> set[str]:
    """Names given as literals to os.environ[...], os.environ.get and its like, and os.getenv."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        key: ast.expr | None = None
        if isinstance(node, ast.Call) and node.args:
            called = ast.unparse(node.func)
            if called in ("os.getenv", "getenv") or re.fullmatch(r"(os\.)?environ\.(get|setdefault|pop)", called):
                key = node.args[0]
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value) in ("os.environ", "environ"):
            key = node.slice
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            found.add(key.value)
    return found


def test_environment_variables_are_all_in_the_table() -> None:
    sources = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "src").rglob("*.py"))]
    read = set().union(*(environment_variables_read(source) for source in sources))
    mentioned = set(re.findall(r"\bMSA_OPS_[A-Z_]+\b", "\n".join(sources)))
    listed = {row[0].strip("`") for row in table(README, "variable")}
    assert read
    assert read == listed
    assert mentioned <= listed, "messages and docstrings of the code name variables that nothing reads"


def test_reading_of_environment_variables_is_found() -> None:
    source = "import os\na = os.environ['A'], os.environ.get('B', ''), os.getenv('C'), os.environ.pop('D')\nx.get('E')"
    assert environment_variables_read(source) == {"A", "B", "C", "D"}


def test_names_from_flashinfer_are_here_or_said_to_be_missing() -> None:
    for names, here in table(README, "`flashinfer.msa_ops`"):
        for name in re.findall(r"`(\w+)`", names):
            assert (name in msa_ops.__all__) == (here != "not here"), name


def project_array(key: str) -> list[str]:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    match = re.search(rf"^\[{re.escape(key)}\]\n(.*?)(?=^\[)", text, re.MULTILINE | re.DOTALL)
    assert match is not None
    return re.findall(r"^([\w-]+) *=", match[1], re.MULTILINE)


def test_extras_of_the_install_lines_exist() -> None:
    named = set(re.findall(r"pip install '\.\[(\w+)\]'", README.read_text(encoding="utf-8")))
    assert {"cuda12", "cuda13"} <= named <= set(project_array("project.optional-dependencies"))


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    code = r"^make ([\w-]+)|`make ([\w-]+)[ `]"
    for page in PAGES:
        for match in re.finditer(code, page.read_text(encoding="utf-8"), re.MULTILINE):
            assert re.search(rf"^{match[1] or match[2]}:", makefile, re.MULTILINE), match[0]


def test_changelogs_newest_version_is_the_packages() -> None:
    project = re.search(r'^version = "([^"]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    newest = re.search(r"^## \[([^\]]+)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert project is not None and newest is not None
    assert newest[1] == project[1]


# --- figures that are written by benchmarks/figures.py ------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_say_what_the_results_and_the_code_say(page: Path, figures: ModuleType) -> None:
    pytest.importorskip("typer")
    text = page.read_text(encoding="utf-8")
    assert figures.render(text) == text, f"make figures would write another {page.name}"


def test_every_figure_is_on_a_page(figures: ModuleType) -> None:
    shown = {match[2] for page in PAGES for match in figures.BLOCK.finditer(page.read_text(encoding="utf-8"))}
    assert shown == set(figures.BLOCKS)
    with pytest.raises(ValueError, match="no block named 'nothing'"):
        figures.render("<!-- figures: nothing -->\n<!-- end of figures -->")
    with pytest.raises(ValueError, match="has no <!-- end"):
        figures.render("<!-- figures: dtypes -->\n")


def test_the_table_of_explain_is_the_committed_runs(figures: ModuleType) -> None:
    text = figures.EXPLAIN_TABLE.read_text(encoding="utf-8")
    assert text == figures.explain_text() and json.loads(text) == figures.explain_table()


def png_comment(data: bytes) -> str:
    """The "Comment" of a PNG, by its chunks."""
    at = 8
    while at < len(data):
        (size,), kind = struct.unpack(">I", data[at : at + 4]), data[at + 4 : at + 8]
        body = data[at + 8 : at + 8 + size]
        assert struct.unpack(">I", data[at + 8 + size : at + 12 + size])[0] == zlib.crc32(kind + body)
        if kind == b"tEXt" and body.startswith(b"Comment\0"):
            return body.partition(b"\0")[2].decode()
        at += 12 + size
    return ""


def test_pictures_are_of_the_committed_run_and_small(figures: ModuleType) -> None:
    pytest.importorskip("matplotlib")
    paths = sorted(figures.IMAGES.glob("h200-*.png"))
    shown = figures.pictures()
    assert {path.stem for path in paths} == set(shown) and shown["h200-step"][0] == "h200-step.json"
    for path in paths:
        data = path.read_bytes()
        assert len(data) < 120_000, path.name
        run, _ = shown[path.stem]
        assert png_comment(data) == figures.note(run), f"make figures would write another {path.name}"
    for path in (ROOT / "docs" / "images").iterdir():
        assert path.stat().st_size < 120_000, path.name
        assert any(f"images/{path.name}" in page.read_text(encoding="utf-8") for page in PAGES), (
            f"nothing shows {path.name}"
        )


def committed_runs() -> dict[str, dict[str, Any]]:
    return {name: json.loads((RESULTS / name).read_text(encoding="utf-8")) for name in ("h200.json", "h200-step.json")}


def grid_ratios() -> dict[tuple[str, str], list[float]]:
    """Peer over ours of the committed run's grid, from the times themselves."""
    ratios: dict[tuple[str, str], list[float]] = {}
    for row in json.loads((RESULTS / "h200.json").read_text(encoding="utf-8"))["rows"]:
        times = {name: s["time_us"]["median"] for name, s in row["sides"].items() if s["status"] == "ok"}
        if row["preset"] == "grid" and row["in_grid"] and "ours" in times:
            for name in times.keys() - {"ours"}:
                ratios.setdefault((row["kv"], name), []).append(times[name] / times["ours"])
    return ratios


def test_the_readmes_headline_is_of_the_times_themselves() -> None:
    rows = {(row[0], row[1].split()[0]): row[2:] for row in table(README, "KV")}
    ratios = grid_ratios()
    assert rows.keys() == ratios.keys()
    for key, values in ratios.items():
        # Rounded as the report's own summary is, and then for the page.
        mean = round(math.exp(sum(map(math.log, values)) / len(values)), 4)
        spread = f"{round(min(values), 4):.2f} to {round(max(values), 4):.2f}"
        losing = sum(value < 1 for value in values)
        assert rows[key] == [f"{mean:.2f}", spread, f"{losing} of {len(values)}"], key


def test_the_benchmark_page_keeps_every_row_and_marks_the_losing_ones() -> None:
    every = [row for run in committed_runs().values() for row in run["rows"]]
    shown = [rows[1:] for rows in tables(ROOT / "docs" / "benchmarks.md") if "floor" in rows[0]]
    presets = list(dict.fromkeys(row["preset"] for row in every))
    assert [len(rows) for rows in shown] == [sum(r["preset"] == preset for r in every) for preset in presets]
    bold = sum(bool(re.search(r"\*\*[01]\.\d+\*\*", cell)) for rows in shown for row in rows for cell in row)
    losing = 0
    for row in every:
        times = {name: s["time_us"]["median"] for name, s in row["sides"].items() if s["status"] == "ok"}
        if row["best"]:
            losing += sum(time / times[row["best"]] < 1 for time in times.values())
    assert bold == losing


def later_run(run: dict[str, Any]) -> dict[str, Any]:
    """A run that also has NVFP4, a step, errors and what was left out, made of the committed one."""
    from msa_ops.bench import goals

    rows = [row for row in run["rows"] if row["kv"] == "bf16" and row["best"]]
    for kv in ("nvfp4-planar", "nvfp4-tiled"):
        for row in rows[:]:
            if row["kv"] == "bf16":
                time = {**row["sides"]["ours"]["time_us"], "median": row["sides"]["ours"]["time_us"]["median"] / 3}
                ours = {"ours": {"status": "ok", "error": 0.002, "time_us": time}}
                rows.append(
                    {
                        **row,
                        "kv": kv,
                        "sides": ours,
                        "peer_goal": None,
                        "work_goal": None,
                        "floor_us": row["floor_us"] * 72 / 256,
                    }
                )
    for part in ("score", "step"):
        sides = {"ours": rows[0]["sides"]["ours"], "flashinfer": {"status": "refused", "reason": "no route"}}
        changes = {
            "preset": "step",
            "label": part,
            "context": 1 << 20,
            "page_uses": 1.8,
            "sides": sides,
            "in_grid": False,
        }
        rows.append({**rows[0], **changes, "speed_goal": None, "peer_goal": None})
    shape = {"kv": "fp8", "heads": "64/4", "batch": 1, "seqlen_q": 1, "side": "ours"}
    accuracy = [{**shape, "q_scale": scale, "status": "ok", "rms": 1.25, "max": 1.5} for scale in (1.0, 6.0)]
    return {**run, "rows": rows, "accuracy": accuracy, "summary": goals.summarise(rows), "not_measured": ["grid fp8"]}


def test_a_later_run_with_more_in_it_is_shown(
    figures: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = later_run(json.loads((RESULTS / "h200.json").read_text(encoding="utf-8")))
    for name in ("cpu.json", "accuracy-cpu.json"):
        (tmp_path / name).write_bytes((RESULTS / name).read_bytes())
    (tmp_path / "h200.json").write_text(json.dumps(run), encoding="utf-8")
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    assert "NVFP4 is 3.00 to 3.00 times as fast as our bf16" in figures.headline()
    assert "NVFP4 planar over tiled: 1.000 to 1.000, limit held" in figures.verdicts()
    assert "not measured: grid fp8" in figures.verdicts()
    text = figures.tables()
    assert "### A decode step with its indexer" in text and "images/h200-step.png" in text
    assert "| context | part |" in text and "Requests share pages" in text and "bf16 B 1 1M: 1.8 times" in text
    assert "| H200 | 32K | 1 | msa_ops | fp8 | 1.250 | 1.500 | 1.250 | 1.500 |" in figures.accuracy()
    assert "not been recorded" not in figures.accuracy()
    kinds = {row["kv"] for row in figures.explain_table()["rows"]}
    assert kinds == {"bf16", "nvfp4"}
    if importlib.util.find_spec("matplotlib"):
        assert "h200-step" in figures.pictures()


def test_the_check_says_what_differs_and_writes_nothing(
    figures: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("typer")
    monkeypatch.setattr("sys.argv", ["figures.py", "--check"])
    assert figures.main() == 0 and capsys.readouterr().out == ""
    for name in (path.name for path in RESULTS.glob("*.json")):
        text = (RESULTS / name).read_text(encoding="utf-8")
        (tmp_path / name).write_text(text.replace('"driver": "', '"driver": "9'), encoding="utf-8")
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    before = README.read_bytes()
    assert figures.main() == 1 and README.read_bytes() == before
    assert set(capsys.readouterr().out.splitlines()) == {
        "differs: README.md", "differs: docs/benchmarks.md", "differs: src/msa_ops/cli/data/h200.json",
    }  # fmt: skip


# --- tables that restate results ---------------------------------------------------------------------------------------


def test_demo_table_is_the_committed_runs() -> None:
    """Every context of the run, losing ones included."""
    run = json.loads((ROOT / "docs" / "demo-cpu.json").read_text(encoding="utf-8"))
    assert table(README, "context") == [demo_row(context) for context in run["contexts"]]
    text = README.read_text(encoding="utf-8")
    assert run["device_name"] == "AMD EPYC, 2 threads" and "two threads of an AMD EPYC" in text
    versions = f"torch {run['versions']['torch'].partition('+')[0]}, transformers {run['versions']['transformers']}"
    assert versions.replace(".0,", ",").removesuffix(".0") in text
    assert f"{run['total_seconds']:.0f} s" in text


def demo_row(run: dict[str, Any]) -> list[str]:
    call, their_call = run["call_ms_ours"], run["call_ms_transformers"]
    token, their_token = run["token_ms_ours"], run["token_ms_transformers"]
    return [
        f"{run['context'] // 1024}K", f"{call:.2f}", f"{their_call:.2f}", f"{their_call / call:.1f}x", f"{token:.1f}",
        f"{their_token:.1f}", f"{their_token / token:.1f}x", f"{run['kv_bytes_selected'] / 2**20:.1f} MiB",
        f"{run['kv_bytes_dense'] / 2**20:.1f} MiB",
    ]  # fmt: skip


def test_demo_sentences_are_the_committed_runs() -> None:
    contexts = json.loads((ROOT / "docs" / "demo-cpu.json").read_text(encoding="utf-8"))["contexts"]
    text = " ".join(README.read_text(encoding="utf-8").split())

    def span(key: str) -> str:
        values = [run[key] for run in contexts]
        return f"{min(values):.3f} to {max(values):.3f}"

    assert f"by {span('logit_difference')}, less than" in text
    assert f"eager path ({span('reference_difference')})" in text
    assert all(run["logit_difference"] < run["reference_difference"] for run in contexts)
    assert all(run["argmax_equal"] == run["argmax_compared"] for run in contexts)
    assert "({}, {} and {} tokens)".format(*(run["argmax_compared"] for run in contexts)) in text
    assert [run["common_prefix"] for run in contexts] == [32, 32, 19]
    assert "the same 32 bytes at 1K and 4K; at 16K they part after 19" in text


def test_cpu_table_is_the_committed_runs() -> None:
    results = ROOT / "benchmarks" / "results" / "cpu.json"
    rows = table(ROOT / "docs" / "cpu.md", "KV")
    assert [row[0] for row in rows] == ["bf16", "fp16", "fp8", "nvfp4_tiled", "nvfp4_planar"]
    for row in rows:
        assert abs(float(row[3]) - float(row[1]) / float(row[2])) < 0.01, row  # of rounded times
    if results.exists():
        wanted = [cpu_row(run) for run in json.loads(results.read_text(encoding="utf-8"))["results"]]
        assert rows == wanted, "docs/cpu.md should have:\n" + "\n".join(f"| {' | '.join(row)} |" for row in wanted)


def cpu_row(run: dict[str, Any]) -> list[str]:
    return [
        run["form"], f"{run['ours_ms']:.2f}", f"{run['sdpa_ms']:.2f}", f"{run['ratio']:.2f}", f"{run['bar']:.1f}",
        f"{run['peak_extra_mib']:.1f}",
    ]  # fmt: skip
