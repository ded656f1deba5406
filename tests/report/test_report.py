"""What a report says about runs: numbers by hand, rollouts that come back, and text that stays text."""

from __future__ import annotations

import base64
import csv
import gzip
import io
import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hacrl.cli.main import app
from hacrl.errors import ConfigError, HacrlError
from hacrl.report.colours import AGENT_COLOURS, METHOD_COLOURS
from hacrl.report.figures import count_ratios
from hacrl.report.page import DATA_PLACE, assemble, template, write_report
from hacrl.report.rollouts import RolloutSampler, encode, ratio_bins
from hacrl.report.runs import find_runs, read_run
from hacrl.report.study_tables import find_study, study_curves, study_tables
from hacrl.report.summary import clip_ranges, report_tables, summarise
from hacrl.report.tables import Spread, Table, as_csv, as_latex, file_name, texts
from hacrl.report.tokens import find_token_texts
from hacrl.rollouts.log import RolloutLog
from tests.support.report_runs import HOSTILE, MadeUpRun, write_evaluation, write_study

BLOCK = re.compile(r'<script type="application/gzip" id="([a-z0-9-]+)">([A-Za-z0-9+/=]*)</script>')


def decoded(text: str) -> Any:
    return json.loads(gzip.decompress(base64.b64decode(text)))


def blocks(page: Path) -> dict[str, Any]:
    return {name: decoded(content) for name, content in BLOCK.findall(page.read_text("utf-8"))}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return MadeUpRun().write(tmp_path / "run")


def test_the_tables_of_a_run_by_hand(run: Path) -> None:
    results, teaching, time = report_tables(find_runs([run]))
    # ada: 0.2, then 0.2 + 0.3; stderr 0.02 each: 1.96 * 0.02 = 0.0392, of the gain 0.0392 * sqrt(2) = 0.0554
    agent, before, low, high, after, *_, gain, gain_low, gain_high, rollouts, updates = results.rows[0]
    assert (agent, before, after, rollouts, updates) == ("ada", 0.2, 0.5, 4 * 4 * 2, 16)
    assert (low, high) == pytest.approx((0.1608, 0.2392), abs=1e-4)
    assert (gain, gain_low, gain_high) == pytest.approx((0.3, 0.24456, 0.35544), abs=1e-4)
    # ada from bob: 4 steps of 8 uses; clipped 0.5, of that 0.25 above; one dropped in each step
    from_bob = next(row for row in teaching.rows if row[:2] == ("ada", "bob"))
    assert from_bob[2:8] == (32, pytest.approx(0.95), 0.25, 0.25, 4, 0)
    assert sum(row[8] for row in teaching.rows if row[0] == "ada") == pytest.approx(1.0)
    assert ("learn", "ada", 12.0, 3.0, 12 / 64) in time.rows


def test_rollouts_spent_are_the_axis_of_accuracy(run: Path) -> None:
    found = read_run(run)
    assert [found.spent_at(step, "ada") for step in (0, 2, 4)] == [0, 16, 32]


def test_the_page_holds_what_the_log_holds(run: Path, tmp_path: Path) -> None:
    write_report(find_runs([run]), tmp_path / "page.html")
    data = blocks(tmp_path / "page.html")
    index = data["summary"]["runs"][0]["rollouts"]
    assert [(step["step"], step["total"], step["kept"]) for step in index] == [
        (step, 32, 32) for step in (1, 2, 3, 4)
    ]
    log = RolloutLog(run / "rollouts")
    rows = {(row["problem"], row["agent"], row["sample"]): row for row in log.read(2)}
    learnt = {
        (row["problem"], row["agent"], row["sample"], row["learner"]): row for row in log.read_learnt(2)
    }
    names = [agent["name"] for agent in data["summary"]["runs"][0]["agents"]]
    seen = 0
    for prompt in data["rollouts-0-2"]["prompts"]:
        for answer in prompt["rollouts"]:
            key = (prompt["id"], names[answer["a"]], answer["i"])
            row = rows[key]
            assert (answer["t"], answer["v"], answer["r"]) == (row["text"], row["verdict"], row["reward"])
            assert answer["l"] == [round(value, 3) for value in row["segments"][0]["token_logprobs"]]
            assert [view["a"] for view in answer["k"]] == [0, 1, 2, 3]
            for view in answer["k"]:
                record = learnt[*key, names[view["a"]]]
                assert view["f"] == record["fate"]
                assert view["A"] == pytest.approx(record["advantage"], rel=1e-4)
            seen += 1
    assert seen == 32


def test_ratios_are_counted_for_all_rollouts_even_if_few_are_drawn(run: Path) -> None:
    sampler = RolloutSampler(run / "rollouts", ["ada", "bob", "carl", "dora"], {})
    found = sampler.step(1, budget=2500)
    assert (found.kept_prompts, found.prompts, found.kept, found.total) == (1, 4, 8, 32)
    rows = [row for row in RolloutLog(run / "rollouts").read_learnt(1) if row["ratio"] is not None]
    assert sum(sum(bins.values()) for bins in found.ratios.values()) == len(rows)


def test_bins_of_ratios() -> None:
    bins = ratio_bins([0.9997, 1.0004])  # the paper's clip range, 0.0007 wide: own bins reach 0.0028
    assert [bins["cross"].number_of(value) for value in (0.0, 0.019, 0.021, 0.999, 1.001, 1.999, 9.0)] == [
        *(0, 0, 1, 49, 50, 99, 100),
    ]
    # 100 bins of 0.000056; number 50 has 1 in its middle, and the clip range has 12 or 13 of them
    assert [bins["own"].number_of(1 + value) for value in (-1.0, 0.0, 0.00002, 0.00003, 0.00005, 1.0)] == [
        *(0, 50, 50, 51, 51, 100),
    ]
    assert bins["own"].number_of(1.00039) - bins["own"].number_of(0.99971) == 12
    assert ratio_bins(None)["own"].number_of(0.5) == 25  # 0 to 2
    assert ratio_bins([0.0, 3.0])["own"].number_of(1.0) == 50


def test_the_draw_depends_on_step_and_prompt_only(run: Path) -> None:
    sampler = RolloutSampler(run / "rollouts", ["ada", "bob", "carl", "dora"], {})
    few, more = sampler.step(1, 2500).prompt_data, sampler.step(1, 8000).prompt_data
    assert [prompt["id"] for prompt in more][: len(few)] == [prompt["id"] for prompt in few]
    assert 1 == len(few) < len(more) < 4


def test_a_large_run_stays_below_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = MadeUpRun(steps=6, prompts=12, tokens=60).write(tmp_path / "run")
    monkeypatch.setattr("hacrl.report.page.ROLLOUT_BYTES", 60_000)
    write_report(find_runs([run]), tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text("utf-8")
    chunks = [len(content) for name, content in BLOCK.findall(text) if name != "summary"]
    assert 40_000 < sum(chunks) < 66_000
    assert min(chunks) > 60_000 / 6 / 2  # every step has its share
    kept = blocks(tmp_path / "page.html")["summary"]["runs"][0]["rollouts"]
    assert all(0 < step["keptPrompts"] < step["prompts"] for step in kept)


def test_long_answers_are_shortened_until_a_step_fits(tmp_path: Path) -> None:
    run = MadeUpRun(steps=1, prompts=2, samples=4, tokens=400).write(tmp_path / "run")
    sampler = RolloutSampler(run / "rollouts", ["ada", "bob", "carl", "dora"], {})
    seen = set()
    for budget in (400_000, 60_000, 20_000, 8_000, 3_000, 1_000, 0):
        found = sampler.step(1, budget)
        assert len(found.encoded()) <= max(budget, 80), budget
        assert found.total == 32
        assert found.shortened == sum(not a["l"] for p in found.prompt_data for a in p["rollouts"])
        for answer in (a for prompt in found.prompt_data for a in prompt["rollouts"]):
            assert (answer["l"] == []) == ("x" in answer) == all("l" not in view for view in answer["k"])
        seen.add((found.kept_prompts, found.kept, found.shortened))
    # all; one prompt with tokens; of one answer of each agent; of none; fewer answers; nothing
    assert seen >= {(2, 32, 0), (1, 16, 12), (1, 16, 16), (1, 4, 4), (0, 0, 0)}


def test_a_hundred_steps_of_long_answers_stay_below_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Per step as in a page of 12 MiB for 100 steps, where one prompt of 32 long answers would not fit."""
    run = MadeUpRun(steps=3, prompts=2, samples=8, tokens=1500).write(tmp_path / "run")
    monkeypatch.setattr("hacrl.report.page.ROLLOUT_BYTES", 12 * 2**20 * 3 // 100)
    write_report(find_runs([run]), tmp_path / "page.html")
    chunks = [
        len(data) for name, data in BLOCK.findall((tmp_path / "page.html").read_text()) if name != "summary"
    ]
    assert len(chunks) == 3
    assert 200_000 < sum(chunks) < 12 * 2**20 * 3 // 100


def test_no_text_of_a_model_becomes_markup(tmp_path: Path) -> None:
    MadeUpRun(steps=1, texts=HOSTILE).write(tmp_path / "run")
    write_report(find_runs([tmp_path / "run"]), tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text("utf-8")
    data = "".join(f"{name}{content}" for name, content in BLOCK.findall(page))
    assert len(page) - len(data) - len(template()) < 60 * len(BLOCK.findall(page))  # nothing but data is new
    assert "window.hacked" not in page
    texts = {a["t"] for p in blocks(tmp_path / "page.html")["rollouts-0-1"]["prompts"] for a in p["rollouts"]}
    assert texts <= set(HOSTILE)


def test_the_page_asks_nothing_of_any_network() -> None:
    page = template()
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    assert "default-src 'none'" in policy[1]
    assert "connect-src 'none'" in policy[1]
    assert "unsafe" not in policy[1]
    assert page.count(DATA_PLACE) == 1
    assert not re.search(r'(src|href)="?https?:', page)
    assert DATA_PLACE not in assemble({"summary": encode({})})


def test_a_study_by_hand(tmp_path: Path) -> None:
    write_study(tmp_path, ["gspo", "hacpo"], seeds=3, agents=("ada", "bob"))
    study = find_study(find_runs([tmp_path]))
    assert study is not None
    assert (study.reference, study.seeds, study.variants) == ("gspo", [0, 1, 2], ("gspo", "hacpo"))
    # after: 0.2 + 0.3 + 0.01 seed under gspo, 0.02 more under hacpo
    assert study.finals("gspo", "ada") == pytest.approx([0.5, 0.51, 0.52])
    assert study.finals("hacpo", "mean") == pytest.approx([0.57, 0.58, 0.59])
    results, differences, seeds = study_tables(study)
    assert [cell.mean for cell in results.rows[0][1:4]] == pytest.approx([0.2, 0.3, 0.25])
    assert results.rows[1][1] == pytest.approx((0.51, 0.01))  # standard deviation of .50 .51 .52
    assert [row[:3] for row in differences.rows] == [
        ("hacpo", "ada", pytest.approx(0.02)),
        ("hacpo", "bob", pytest.approx(0.02)),
        ("hacpo", "mean", pytest.approx(0.02)),
    ]
    assert seeds.rows[4] == ("hacpo", 1, pytest.approx(0.53), pytest.approx(0.63), pytest.approx(0.58))
    curve = study_curves(study)[0]
    assert (curve["agent"], curve["variant"], curve["rollouts"]) == ("ada", "gspo", [0, 16, 32])
    assert curve["mean"] == pytest.approx([0.2, 0.36, 0.51])
    # 0.01 * 4.3027 / sqrt(3)
    assert curve["high"][2] - curve["mean"][2] == pytest.approx(0.02484, abs=1e-4)


def test_ablations_and_values_of_alpha_are_tables_of_their_own(tmp_path: Path) -> None:
    variants = ["gspo", "hacpo", "hacpo_no_clip", "hacpo_alpha_0", "hacpo_alpha_3", "hacpo_no_baseline"]
    write_study(tmp_path, variants, seeds=3, agents=("ada", "bob"))
    (tmp_path / "study.json").write_text(json.dumps({"reference": "gspo", "variants": variants}))
    study = find_study(find_runs([tmp_path]))
    assert study is not None
    tables = {table.name: table for table in study_tables(study)}
    alpha = tables["study-alpha-hacpo"]
    assert alpha.columns[:2] == ("variant", "alpha")
    assert [row[:2] for row in alpha.rows] == [
        *(("hacpo_alpha_0", "0"), ("hacpo", "1"), ("hacpo_alpha_3", "3")),
    ]
    # variant i gains 0.02 i more: alpha 3, the fifth, 0.06 more than hacpo, the second
    assert alpha.rows[2][5:8] == pytest.approx((0.06, 0.06, 0.06))
    assert alpha.rows[1][5:] == (None,) * 5
    ablations = tables["study-ablations-hacpo"]
    assert [row[:2] for row in ablations.rows] == [
        ("hacpo", "–"),
        ("hacpo_no_clip", "cross_clip = false"),
        ("hacpo_no_baseline", "capability_baseline = false"),
    ]
    # of both agents after training: 0.2 or 0.3, 0.3, 0.02 for hacpo, and 0, 0.01 or 0.02 by seed
    assert ablations.rows[0][2:5] == (
        *(pytest.approx((0.53, 0.01)), pytest.approx((0.63, 0.01)), pytest.approx((0.58, 0.01))),
    )


def test_ablations_are_tested_against_the_whole_method(tmp_path: Path) -> None:
    write_study(tmp_path, ["hacpo", "hacpo_no_clip"], seeds=4, agents=("ada",), noise=0.05)
    study = find_study(find_runs([tmp_path]))
    assert study is not None
    table = next(table for table in study_tables(study) if table.name == "study-ablations-hacpo")
    own, other = study.finals("hacpo_no_clip", "ada"), study.finals("hacpo", "ada")
    differences = [one - two for one, two in zip(own, other, strict=True)]
    mean = sum(differences) / 4
    error = math.sqrt(sum((value - mean) ** 2 for value in differences) / 3 / 4)
    _, low, high, p, corrected = table.rows[1][-5:]
    assert (low, high) == pytest.approx((mean - 3.182446 * error, mean + 3.182446 * error))  # t of 3 degrees
    assert p == corrected  # of one comparison


def test_methods_by_benchmark(tmp_path: Path) -> None:
    write_study(tmp_path, ["gspo", "hacpo"], seeds=2, agents=("ada",))
    write_evaluation(
        tmp_path,
        [
            *((None, None, "ada", "math500", 0.3), (None, None, "ada", "gsm8k", 0.5)),
            *(("gspo", 0, "ada", "math500", 0.4), ("gspo", 1, "ada", "math500", 0.42)),
            *(("hacpo", 0, "ada", "math500", 0.45), ("hacpo", 1, "ada", "math500", 0.49)),
            *(("gspo", 0, "ada", "gsm8k", 0.6), ("hacpo", 0, "ada", "gsm8k", 0.7)),
        ],
    )
    tables = {table.name: table for table in report_tables(find_runs([tmp_path]))}
    main = tables["study-benchmarks"]
    assert main.columns == ("agent", "method", "math500", "gsm8k", "average")
    assert main.rows[0] == ("ada", "before", (0.3, None), (0.5, None), (0.4, None))
    # gspo: .40 and .42, deviation .02 / sqrt(2); gsm8k of one seed, so the average is that seed's
    assert main.rows[1][2] == pytest.approx((0.41, 0.02 / math.sqrt(2)))
    assert main.rows[1][3:] == ((0.6, None), (pytest.approx(0.5), None))
    rows = {row[2]: row for row in tables["study-benchmark-differences"].rows}
    assert rows["math500"][3] == pytest.approx(0.06)  # .05 and .07
    assert rows["math500"][4:6] == pytest.approx((0.06 - 0.12706, 0.06 + 0.12706), abs=1e-4)  # 12.706 * .01
    assert (rows["gsm8k"][3], rows["gsm8k"][6], rows["gsm8k"][8]) == (pytest.approx(0.1), None, 1)


def test_a_run_s_benchmarks(run: Path) -> None:
    write_evaluation(run, [(None, None, "bob", "math500", 0.3), (None, 0, "bob", "math500", 0.4)])
    table = next(table for table in report_tables(find_runs([run])) if table.kind == "benchmarks")
    assert table.rows == (
        ("bob", "before", pytest.approx((0.3, 0.02))),
        ("bob", "after", pytest.approx((0.4, 0.02))),
    )


def test_damaged_benchmarks_are_named(run: Path) -> None:
    (run / "evaluations" / "x").mkdir(parents=True)
    (run / "evaluations" / "x" / "results.json").write_text('{"results": [{"agent": 1}]}')
    with pytest.raises(HacrlError, match=r"x/results\.json is damaged or of another version"):
        report_tables(find_runs([run]))


def test_the_runs_of_a_study_keep_their_own_tables(tmp_path: Path) -> None:
    write_study(tmp_path, ["gspo", "hacpo"], seeds=2)
    runs = find_runs([tmp_path])
    tables = [table for table in report_tables(runs) if table.run is not None]
    assert [(table.run, table.kind) for table in tables] == [
        (number, kind) for number in range(4) for kind in ("results", "teaching", "time")
    ]
    assert len({table.name for table in report_tables(runs)}) == len(report_tables(runs))
    assert tables[3].name == "gspo/seed-1-results"


def test_an_unfinished_seed_is_left_out_of_a_study(tmp_path: Path) -> None:
    write_study(tmp_path, ["gspo", "hacpo"], seeds=3)
    shutil.rmtree(tmp_path / "hacpo" / "seed-1")
    study = find_study(find_runs([tmp_path]))
    assert study is not None
    assert study.seeds == [0, 2]


def test_the_study_s_own_file_names_the_reference(tmp_path: Path) -> None:
    write_study(tmp_path, ["gspo", "hacpo", "naive"], seeds=2)
    study_file = {"reference": "naive", "variants": ["hacpo", "naive", "gspo"]}
    (tmp_path / "study.json").write_text(json.dumps(study_file))
    study = find_study(find_runs([tmp_path]))
    assert study is not None
    assert study.variants == ("naive", "hacpo", "gspo")


def test_two_runs_are_no_study(tmp_path: Path) -> None:
    one = MadeUpRun(method="gspo").write(tmp_path / "one")
    two = MadeUpRun(method="hacpo").write(tmp_path / "two")
    runs = find_runs([one, two])
    assert find_study(runs) is None  # one seed: nothing to test
    summary = summarise(runs, report_tables(runs))
    assert [run["name"] for run in summary["runs"]] == ["one", "two"]
    assert summary["variantColours"] == {"gspo": "#0072B2", "hacpo": "#D55E00"}
    assert list(summary["agentColours"]) == ["ada", "bob", "carl", "dora"]


def test_the_ranges_in_which_ratios_teach() -> None:
    hacpo = {"name": "hacpo", "clip_low": 0.1, "clip_high": 0.2, "delta": 0.3, "cross_upper": 1.0}
    assert clip_ranges(hacpo) == {"own": [0.9, 1.2], "cross": [0.7, 1.0]}
    assert clip_ranges({**hacpo, "cross_clip": False})["cross"] is None
    assert clip_ranges({"name": "gspo", "clip_low": 0.1, "clip_high": 0.2})["cross"] == [0.9, 1.2]
    assert clip_ranges({"name": "mine"}) == {"own": None, "cross": None}


def test_a_run_that_has_only_begun(tmp_path: Path) -> None:
    run = MadeUpRun().write(tmp_path / "run", until=0)
    write_report(find_runs([run]), tmp_path / "page.html")
    summary = blocks(tmp_path / "page.html")["summary"]
    assert summary["runs"][0]["steps"] == []
    assert summary["runs"][0]["status"]["state"] == "running"


def test_a_line_under_way_is_not_read(run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "age')
    assert read_run(run).steps == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("config.yaml", "agents: 7\n", "is not the config of a run"),
        ("config.yaml", "agents: [1]\n", "is not the config of a run"),
        ("metrics.jsonl", '{"step": 1}\n', "damaged or of another version"),
        ("metrics.jsonl", "[]\n", "not a mapping"),
        ("rollouts/step-000001/ada.jsonl", '{"schema": 1}\n', "step 1"),
        ("rollouts/step-000001/learnt/ada.jsonl", "{\n", "step 1"),
    ],
)
def test_damaged_files_are_named(run: Path, tmp_path: Path, name: str, content: str, said: str) -> None:
    (run / name).write_text(content)
    with pytest.raises(HacrlError, match=said):
        write_report(find_runs([run]), tmp_path / "page.html")


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run: name the folder of a run"):
        find_runs([tmp_path])


def test_a_link_out_of_the_run_is_not_followed(run: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.jsonl").write_text('{"schema": 1, "problem": "p"}\n')
    (run / "rollouts" / "step-000001" / "ada.jsonl").unlink()
    (run / "rollouts" / "step-000001" / "ada.jsonl").symlink_to(tmp_path / "secret.jsonl")
    with pytest.raises(HacrlError, match="leads out of"):
        write_report(find_runs([run]), tmp_path / "page.html")


def test_tokens_of_a_bundled_agent_make_up_the_text(tmp_path: Path) -> None:
    texts = find_token_texts(tmp_path, "llama", "bundled:llama-pairs")
    assert texts is not None
    from tokenizers import Tokenizer

    from hacrl.models.model_sources import bundled_agents

    tokenizer = Tokenizer.from_file(str(bundled_agents()["llama-pairs"] / "tokenizer.json"))
    ids = tokenizer.encode("17*3=51;51+19=70#70", add_special_tokens=False).ids
    pieces = texts.pieces(ids, "17*3=51;51+19=70#70")
    assert pieces is not None
    assert "".join(pieces).startswith("17*3=51;51+19=70#70")
    assert len(pieces) == len(ids)
    assert texts.pieces(ids, "another text") is None
    assert find_token_texts(tmp_path, "x", "example/no-such-model") is None


TABLE = Table("a/b", "Title", ("name", "x"), (("=1+1", 0.123456), ('q"\u202e', None), ("a_b & 5%", 12345)))


def test_csv_has_all_digits_and_no_formulas() -> None:
    rows = list(csv.reader(io.StringIO(as_csv(TABLE))))
    assert rows == [["name", "x"], ["'=1+1", "0.123456"], ['q"\\u202e', ""], ["a_b & 5%", "12345"]]


def test_means_with_their_spread() -> None:
    rows = (("a", Spread(0.5123, 0.0126)), ("b", Spread(0.25, None)), ("c", None))
    table = Table("t", "T", ("name", "ada"), rows)
    assert as_csv(table) == 'name,ada,"ada, ±"\na,0.5123,0.0126\nb,0.25,\nc,,\n'
    assert "a & 0.512 $\\pm$ 0.013 \\\\" in as_latex(table)
    assert "{lr}" in as_latex(table)


def test_a_column_s_numbers_have_equally_many_decimals() -> None:
    rows = ((0.5, 12.5, 0.25, 3), (0.0123, 7.0, 1e-7, 12345), (0.0, None, 0.0, None))
    table = Table("t", "T", ("a", "b", "p", "n"), rows)
    assert texts(table) == [
        ["0.500", "12.5", "0.250", "3"],
        ["0.012", "7.0", "1.0e-07", "12,345"],  # what is not 0 is not shown as 0
        ["0.000", "–", "0.000", "–"],
    ]


def test_a_difference_and_its_interval_have_equally_many_decimals() -> None:
    rows = ((-0.00052, -0.0103, 0.0092), (1e-17, -0.0039, 0.00388))
    table = Table("t", "T", ("difference", "low", "high"), rows)
    assert texts(table) == [["−0.0005", "−0.0103", "0.0092"], ["0.0000", "−0.0039", "0.0039"]]
    assert "$-$0.0103" in as_latex(table)


def test_latex_escapes_what_latex_reads() -> None:
    text = as_latex(TABLE)
    assert "\\begin{tabular}{lr}" in text
    assert "a\\_b \\& 5\\% & 12,345 \\\\" in text
    assert "=1+1 & 0.123 \\\\" in text


def test_a_table_s_rows_fit_its_columns() -> None:
    with pytest.raises(ValueError, match="1 cells in 2 columns"):
        Table("a", "A", ("x", "y"), ((1,),))


def test_the_command_writes_page_tables_and_figures(tmp_path: Path) -> None:
    run, out = MadeUpRun(agents=("ada", "bob"), steps=2).write(tmp_path / "run"), tmp_path / "out"
    result = CliRunner().invoke(
        app,
        ["report", str(run), "--csv", f"{out}/csv", "--latex", f"{out}/tex", "--figures", f"{out}/figures"],
    )
    assert result.exit_code == 0, result.output
    assert result.output.startswith(f"Report: {run}/report.html (")
    names = {path.name for path in out.rglob("*") if path.is_file()}
    assert {f"{name}.{kind}" for name in ("results", "teaching", "time") for kind in ("csv", "tex")} <= names
    drawn = (
        *("accuracy", "before-after", "time", "rollout-reward", "learning-gradient_alignment"),
        *("who-taught-whom", "taught-ada", "ratios-own-ada", "ratios-cross-bob"),
    )
    assert {f"{file_name(name)}.{kind}" for name in drawn for kind in ("svg", "png")} <= names
    assert all(line in result.output for line in map(str, out.rglob("*.csv")))
    svg = (out / "figures" / "accuracy.svg").read_text("utf-8")
    assert "#332288" in svg  # ada's colour
    assert "<dc:date>" not in svg  # equal runs have equal figures


def test_ratios_in_figures_are_those_of_all_rollouts(run: Path) -> None:
    found = count_ratios(read_run(run))
    rows = [row for step in (1, 2, 3, 4) for row in RolloutLog(run / "rollouts").read_learnt(step)]
    with_ratio = [row for row in rows if (row["learner"], row["agent"]) == ("ada", "bob") and row["ratio"]]
    assert found["ada>bob"].total() == len(with_ratio)
    inside = [row for row in with_ratio if 0.9 <= row["ratio"] < 1.0]
    assert sum(found["ada>bob"][number] for number in range(45, 50)) == len(inside)  # bins of 0.02 from 0


def test_agents_have_no_colour_of_a_main_method() -> None:
    main = [METHOD_COLOURS[name] for name in ("hacpo", "gspo", "naive", "grpo", "gspo_x2")]
    assert set(AGENT_COLOURS).isdisjoint(main)
    assert len(set(AGENT_COLOURS)) == len(AGENT_COLOURS)


def test_a_report_needs_neither_torch_nor_transformers(run: Path) -> None:
    code = (
        "import sys; from hacrl.cli.main import app\n"
        f"try: app(['report', {str(run)!r}])\nexcept SystemExit as end: assert not end.code\n"
        "print(sorted({'torch', 'transformers', 'matplotlib', 'pandas'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[-1] == "[]"
