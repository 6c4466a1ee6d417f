"""Which cells an experiment has."""

from pathlib import Path

import pytest

from mosar.experiments.settings import Axis, ExperimentSettings
from mosar.geometries import MATCHED_VARIANTS


def settings(**given):
    return ExperimentSettings(**{"preset": "smoke", "data": Path("data")} | given)


def names(experiment):
    return [cell.name for cell in experiment.cells()]


def test_seed_by_seed():
    assert names(settings(variants=("rope", "mosar"), seeds=2)) == [
        *("rope-seed0", "mosar-seed0", "rope-seed1", "mosar-seed1")
    ]
    assert [cell.variant for cell in settings().cells()] == list(MATCHED_VARIANTS)


def test_seeds_reach_parameters_and_data(dataset):
    experiment = settings(variants=("rope", "mosar"), seeds=2, data=dataset)
    configs = [experiment.config(cell) for cell in experiment.cells()]
    assert [(c.train.seed, c.data.seed) for c in configs] == [(0, 0), (0, 0), (1, 1), (1, 1)]
    assert {c.variant for c in configs} == {"rope", "mosar"}


def test_an_axis_repeats_those_who_read_it(dataset):
    axis = Axis.parse("attention.barrier=4, 6,8")
    experiment = settings(variants=("rope", "fixed-s", "mosar"), grid=(axis,), data=dataset)
    assert names(experiment) == [
        "rope-seed0",
        *(f"fixed-s-seed0-attention.barrier={b}" for b in (4, 6, 8)),
        *(f"mosar-seed0-attention.barrier={b}" for b in (4, 6, 8)),
    ]
    barriers = [experiment.config(cell).attention.barrier for cell in experiment.cells()]
    assert barriers == [6.0, 4.0, 6.0, 8.0, 4.0, 6.0, 8.0]


@pytest.mark.parametrize("key", ["attention.rope_theta=1e3,1e4", "attention.rope_fraction=0.5,1"])
def test_alibi_does_not_rotate(key):
    cells = settings(grid=(Axis.parse(key),)).cells()
    assert [cell.variant for cell in cells].count("alibi") == 1
    assert len(cells) == 2 * (len(MATCHED_VARIANTS) - 1) + 1


REGIMES = (
    '[{"name":"S","reach":4.0,"plateau":0.5},{"name":"G","reach":64.0,"plateau":1.0}]',
    '[{"name":"S","reach":8.0,"plateau":0.5},{"name":"G","reach":64.0,"plateau":1.0}]',
)


def test_several_axes_change_one_key_at_a_time(dataset):
    axes = tuple(map(Axis.parse, ("attention.ladder=true", "attention.barrier=4,8")))
    experiment = settings(variants=("mosar", "fixed-s", "rope"), grid=axes, data=dataset)
    assert [(cell.variant, cell.grid) for cell in experiment.cells()] == [
        ("mosar", {}),
        ("mosar", {"attention.ladder": "true"}),
        ("mosar", {"attention.barrier": "4"}),
        ("mosar", {"attention.barrier": "8"}),
        ("fixed-s", {}),
        ("fixed-s", {"attention.barrier": "4"}),
        ("fixed-s", {"attention.barrier": "8"}),
        ("rope", {}),
    ]


def test_a_change_for_all_cells_is_what_an_axis_starts_from(dataset):
    axes = tuple(map(Axis.parse, ("attention.ladder=2", "attention.barrier=8")))
    experiment = settings(
        variants=("mosar",), grid=axes, changes=("attention.ladder=4",), data=dataset
    )
    found = [experiment.config(cell).attention for cell in experiment.cells()]
    assert [(one.ladder, one.barrier) for one in found] == [(4, 6.0), (2, 6.0), (4, 8.0)]
    twice = (*axes, Axis.parse("attention.barrier=5"))
    with pytest.raises(ValueError, match="each --grid must have a key of its own"):
        settings(variants=("mosar",), grid=twice)


def test_an_axis_of_regimes(dataset):
    axis = Axis.parse(f"attention.regimes={REGIMES[0]},{REGIMES[1]}")
    assert axis.values == REGIMES
    experiment = settings(variants=("rope", "rope-m-mask", "mosar"), grid=(axis,), data=dataset)
    mosar = experiment.cells()[-2:]
    assert [experiment.config(cell).attention.regimes[0].reach for cell in mosar] == [4.0, 8.0]
    # What no file can be called is named by its hash.
    assert len({cell.name for cell in mosar}) == 2
    assert all("{" not in cell.name and len(cell.name) < 60 for cell in mosar)


@pytest.mark.parametrize(
    "given, said",
    [
        ({"preset": "huge"}, "preset must be one of smoke, quick, small"),
        ({"variants": ("ropee",)}, "did you mean 'rope'?"),
        ({"variants": ("rope", "rope")}, "variants must be named once"),
        ({"variants": ()}, "at least one variant is needed"),
        ({"seeds": 0}, "seeds must be at least 1, got 0"),
        ({"changes": ("train.seed=3",)}, "train.seed is set by --seeds, not by --set"),
        ({"changes": ("data.folder=x",)}, "data.folder is set by --data, not by --set"),
        *(
            (
                {"grid": (Axis.parse(f"{key}=0,1"),)},
                f"{key} is set by {option}, it cannot be an axis",
            )
            for key, option in (
                ("train.seed", "--seeds"),
                ("data.seed", "--seeds"),
                ("data.folder", "--data"),
            )
        ),
    ],
)
def test_refused(given, said):
    with pytest.raises(ValueError, match=said.replace("?", r"\?")):
        settings(**given)


@pytest.mark.parametrize(
    "text, said",
    [
        ("attention.barrier", "a grid is written dotted.key=value,value"),
        ("attention.barrier=4,,6", "a grid is written"),
        ("attention.barrier=4,4", "names each value once"),
        ("attention.barier=4,6", "did you mean 'attention.barrier'"),
        ("attention.barrier=high", "attention.barrier must be a number, got 'high'"),
    ],
)
def test_refused_axis(text, said):
    with pytest.raises(ValueError, match=said):
        Axis.parse(text)


@pytest.mark.parametrize(
    "given, said",
    [
        # The validation split has 3,049 tokens.
        ({"lengths": ("1x", "48x")}, r"3049 tokens, too few for a window of 3072 .*--lengths"),
        (
            {"lengths": ("63", "100")},
            r"too few for a block of 6300, which windows of 63, 100 divide",
        ),
        ({"eval_tokens": 255}, r"eval_tokens must be at least 256, for a window of 256; got 255"),
        (
            {"lengths": ("40", "60"), "eval_tokens": 100},
            r"at least 120, for a block of 120, which windows of 40, 60 divide; got 100",
        ),
        ({"preset": "retrieval", "eval_tokens": 1023}, r"eval_tokens must be at least 1024"),
        (
            {"preset": "retrieval", "lengths": ("100",)},
            r"lengths must be at least 256 for recall learnt at 256, got 100",
        ),
        ({"lengths": ("2y",)}, r"a length is a multiple"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_before_training(dataset, given, said):
    with pytest.raises(ValueError, match=said):
        settings(variants=("rope",), data=dataset, **given).check_cells()


def test_only_text_needs_data():
    assert settings().reads_text and not settings(preset="retrieval").reads_text
    assert settings(preset="retrieval").data_fingerprint() is None
    both = Axis.parse("data.task=recall,text")
    assert settings(preset="retrieval", grid=(both,)).reads_text


def test_an_axis_that_nobody_reads():
    with pytest.raises(ValueError, match=r"none of the variants rope, alibi reads attention.bar"):
        settings(variants=("rope", "alibi"), grid=(Axis.parse("attention.barrier=4,6"),))
