"""The map of networks and the table of messages, from made-up records with a known answer."""

from pathlib import Path
from typing import Any

from tests.records import run, write_study

from paceline.report.answer import answer
from paceline.report.charts.network_map import network_rows
from paceline.report.commentary.all import comments
from paceline.report.lines import Study
from paceline.report.messages import messages_table
from paceline.report.networks import rate_of
from paceline.report.reading import read_study
from paceline.report.render import render


def grid(folder: Path, times: dict[tuple[str, str], float | None], **known: Any) -> Study:
    """(network, codec): seconds to the accuracy; two seeds, half a per cent apart."""
    runs = [run("serial", 1, 5.0, 0.9, reached_s=4.0, target=0.85) for _ in range(2)]
    for (network, codec), seconds in times.items():
        for factor in (0.995, 1.005):
            record = run(
                "allreduce",
                4,
                10.0 * factor,
                0.9,
                reached_s=seconds and seconds * factor,
                target=0.85,
                codec=codec,
                network=network,
                varied={"network": network, "codec": codec},
                **known,
            )
            if codec != "none":
                record["codec"] = {"message_bytes": 1000, "plain_bytes": 32_000}
                for worker in record["workers"]:
                    worker |= {
                        "encode_s": 0.02,
                        "decode_s": 0.03,
                        "payload_sent_bytes": 30_000,
                        "sync_s": 0.01,
                    }
            runs.append(record)
    return read_study(write_study(folder, runs))


def said(study: Study, kind: str) -> list[str]:
    return [c.text for c in comments(study) if c.kind == kind]


FAST_ONLY_WHERE_SLOW = {
    ("unlimited", "none"): 4.0,
    ("unlimited", "sign"): 5.0,
    ("10mbit", "none"): 100.0,
    ("10mbit", "sign"): 10.0,
    ("100mbit", "none"): 12.0,
    ("100mbit", "sign"): None,
}


def test_networks_are_put_in_order() -> None:
    assert sorted(["unlimited", "1gbit", "10mbit", "100mbit"], key=rate_of) == [
        "10mbit",
        "100mbit",
        "1gbit",
        "unlimited",
    ]


def test_the_map_is_relative_to_plain_all_reduce_on_the_same_links(tmp_path: Path) -> None:
    rows = {
        (r["network"], r["way"]): r
        for r in network_rows(grid(tmp_path / "s", FAST_ONLY_WHERE_SLOW))
    }
    assert rows["10mbit", "allreduce x 4"]["relative"] == 1.0
    assert rows["10mbit", "allreduce, sign x 4"]["relative"] == 0.1
    assert rows["unlimited", "allreduce, sign x 4"]["text"] == "1.25"
    assert rows["100mbit", "allreduce, sign x 4"]["text"] == "never"
    assert [rows[n, "allreduce x 4"]["place"] for n in ("10mbit", "100mbit", "unlimited")] == [
        0,
        1,
        2,
    ]
    shade = [
        rows["10mbit", "allreduce, sign x 4"]["shade"],
        rows["unlimited", "allreduce, sign x 4"]["shade"],
    ]
    assert shade[0] == -1.0
    assert 0 < shade[1] < 1


def test_the_answer_begins_with_the_networks(tmp_path: Path) -> None:
    first = answer(grid(tmp_path / "s", FAST_ONLY_WHERE_SLOW))[0]
    assert "`allreduce, sign x 4` on links of 10mbit" in first
    assert "`allreduce x 4` on links of 100mbit and unlimited" in first


def test_it_says_who_wins_and_that_compression_does_not_pay(tmp_path: Path) -> None:
    found = said(grid(tmp_path / "s", FAST_ONLY_WHERE_SLOW), "network")
    assert any(
        "links of 10mbit, `allreduce, sign x 4` reached the target accuracy 10.00x as soon" in text
        for text in found
    )
    assert any(
        "On unlimited links, no setting reached the target accuracy clearly sooner" in text
        for text in found
    )
    assert any(
        "compression does not pay: the best codec, `sign`, took 1.25x the time" in text
        for text in found
    )


def test_it_says_so_too_where_compression_pays(tmp_path: Path) -> None:
    """Judged by the time to the accuracy, which the sentence is about: training takes as long with
    a codec as without.
    """
    times = {
        ("unlimited", "none"): 40.0,
        ("unlimited", "sign"): 5.0,
        ("10mbit", "none"): 100.0,
        ("10mbit", "sign"): 10.0,
    }
    found = said(grid(tmp_path / "s", times), "network")
    assert any("compression still pays: `allreduce, sign x 4`" in text for text in found)
    assert not any("does not pay" in text for text in found)


def test_one_network_is_no_map(tmp_path: Path) -> None:
    assert (
        network_rows(grid(tmp_path / "s", {("10mbit", "none"): 100.0, ("10mbit", "sign"): 10.0}))
        == []
    )


def test_messages_are_told_against_a_plain_ring(tmp_path: Path) -> None:
    study = grid(tmp_path / "s", FAST_ONLY_WHERE_SLOW)
    page = messages_table(study)
    assert "<td>1/32.0</td>" in page
    # 30,000 bytes in 10 steps; a ring of 4 sends 48,000 a step
    assert "<td>3.0 kB</td><td>6.2%</td>" in page
    assert "<td>2.00 ms</td><td>3.00 ms</td>" in page
    assert any(
        "spent more time on encoding and decoding (5.0 ms per step)" in text
        for text in said(study, "codec")
    )
    assert messages_table(grid(tmp_path / "t", {("10mbit", "none"): 1.0})) == ""


def test_random_k_is_told_of(tmp_path: Path) -> None:
    study = grid(tmp_path / "s", {("10mbit", "none"): 100.0, ("10mbit", "randomk"): 10.0})
    for line in study.lines:
        if line.varied.get("codec") == "randomk":
            for record in line.runs:
                record.record["result"]["test_accuracy"] = 0.5
    assert any("hardly learned (50.00% against 90.00%)" in text for text in said(study, "codec"))


def test_the_page_has_both(tmp_path: Path) -> None:
    grid(tmp_path / "s", FAST_ONLY_WHERE_SLOW)
    page = render(tmp_path / "s").read_text()
    assert "What is fastest at which bandwidth" in page
    assert "What a message costs" in page
    assert (tmp_path / "s" / "figures" / "network_map.png").stat().st_size > 5000
