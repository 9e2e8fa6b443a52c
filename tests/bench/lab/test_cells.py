"""The experiment of workers in cells: its shape, at a small size."""

from bench.lab.sweeps.cells import HEAVY, PLACES, CellsOfWorkers, workload
from bench.workloads.shared_prefix import SharedPrefix
from tests.bench.lab.experiment_rows import figure, rows_of


def test_more_cells_serve_about_as_much_and_stay_within_their_bound() -> None:
    """Workers are busy with one cell and with four, and gaps are below the sum of the cells' bounds, which grows with
    the cells. In so short a run four cells are still filling their caches.
    """
    rows = rows_of("cells")
    one, many = ({"cells": number} for number in ("1", "4"))
    for labels in (one, many):
        assert figure(rows, "busy", **labels) > 0.95
        assert figure(rows, "sum of gaps", **labels) < figure(rows, "bound", **labels)
    assert figure(rows, "service/s", **many) > 0.7 * figure(rows, "service/s", **one)
    assert figure(rows, "bound", **many) > figure(rows, "bound", **one)
    assert figure(rows, "of one cell", **many) < 0.5 * figure(rows, "of one cell", **one)


def test_the_traffic_grows_with_the_fleet_and_the_number_of_clients_does_not() -> None:
    """Heavy clients have more calls open and more prefixes; light ones call more often."""
    small, large = workload(16, 100), workload(64, 100)
    heavy = [each.heavy for each in (small, large)]
    assert [each.concurrency * HEAVY for each in heavy] == [2 * PLACES * 16, 2 * PLACES * 64]
    assert [each.groups for each in heavy if isinstance(each, SharedPrefix)] == [4, 16]
    assert large.light.rate == 4 * small.light.rate
    assert len(small.clients(0)) == len(large.clients(0)) == 100


def test_the_sizes_are_those_of_the_document() -> None:
    """16, 256 and 1,024 workers in one to sixteen cells, beside 10,000 clients."""
    sizes = [(len(each.scenario.workers), each.scenario.cells) for each in CellsOfWorkers().cells(quick=False)]
    assert {workers for workers, _ in sizes} == {16, 256, 1024}
    assert {min(cells for w, cells in sizes if w == workers) for workers, _ in sizes} == {1}
    assert {max(cells for w, cells in sizes if w == workers) for workers, _ in sizes} == {16}
