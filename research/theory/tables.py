"""The tables of research/notes/theory.md: ``python -m research.theory`` prints them, a test compares."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from research.theory.iterations import Method
from research.theory.problems import adam_floor, distance_slope, measured_radius
from research.theory.spectra import best, delay_limit, noise_gain, orbit_radius, stability_limit, tuned_updates

Table: TypeAlias = dict[str, list[float]]
"""First cell of a row -> its numbers."""


def delays() -> Table:
    """Limit by formula and by roots, best step and rate, limit with strength d: one row per delay."""
    rows = {}
    for d in range(4):
        limit, (h, rate) = stability_limit(Method(delay=d)), best(Method(delay=d))
        rows[str(d)] = [delay_limit(d), limit, h, rate, stability_limit(Method(delay=d, strength=d))]
    return rows


def limits() -> Table:
    """Stability limits lr * lambda, the last two with strength 2: one row per beta."""
    rows = {}
    for beta in (0, 0.5, 0.9, 0.95):
        twice = [Method(beta, 1, 2, nesterov) for nesterov in (False, True)]
        rows[f"{beta:g}"] = [stability_limit(method) for method in [*_six_methods(beta), *twice]]
    return rows


def tuned() -> Table:
    """Updates per factor e with the best step and, for momentum, the best beta of 13."""
    betas = [1 - 10 ** (-i / 4) for i in range(13)]
    plain = [Method(), Method(delay=1), Method(delay=1, strength=1)]
    rows = {}
    for condition_number in (100, 1000):
        numbers = [tuned_updates((method,), condition_number) for method in plain]
        for choice in (0, 1, 2, 4, 5):
            numbers.append(tuned_updates(tuple(_six_methods(beta)[choice] for beta in betas), condition_number))
        rows[str(condition_number)] = numbers
    return rows


def orders() -> Table:
    """Order of the distance to the synchronous trajectory: one row per (delay, strength); beta 0 and 0.9."""
    cases = [(1, 0), (1, 0.5), (1, 1), (2, 0), (2, 1), (2, 2)]
    return {f"d = {d}, s = {s:g}": [distance_slope(d, s, beta) for beta in (0.0, 0.9)] for d, s in cases}


def noise() -> Table:
    """Stationary variance over that of synchronous training with the same beta, h = 0.1."""
    rows = {}
    for beta in (0, 0.5, 0.9, 0.95):
        fresh = noise_gain(Method(beta), 0.1)
        delayed, fed = Method(beta, 1), Method(beta, 1, 1)
        gains = [noise_gain(delayed, 0.1), noise_gain(fed, 0.1), noise_gain(fed, 0.1, base_trajectory=True)]
        rows[f"{beta:g}"] = [gain / fresh for gain in gains]
    return rows


def orbits() -> Table:
    """Stationarity radius over L * lr: formula, measured without noise, with noise 0.03 and 0.3."""
    rows = {}
    for beta in (0, 0.95):
        for name, method in zip(_NAMES, _six_methods(beta)):
            if beta or not method.nesterov:
                measured = [measured_radius(method, noise) for noise in (0.0, 0.03, 0.3)]
                rows[f"{name}, beta {beta:g}"] = [orbit_radius(method), *measured]
    return rows


def adam() -> Table:
    """Oscillation of Adam (0.9, 0.95) over lr: 1 / limit, measured without noise, with noise 0.1."""
    rows = {}
    for name, method in zip(_NAMES, _six_methods(0.9)):
        floors = [adam_floor(method, 0.95, noise) for noise in (0.0, 0.1)]
        rows[name] = [1 / stability_limit(method), *floors]
    return rows


def staleness() -> Table:
    """Stability limits without and with Error Feedback of strength phi: one row per phi."""
    rows = {}
    for phi in (0, 0.125, 0.25, 0.375, 0.5, 1):
        forms = [(0.0, False), (0.95, False), (0.95, True)]
        methods = [Method(beta, 1, s, nesterov, phi) for beta, nesterov in forms for s in (0.0, phi)]
        rows[f"{phi:g}"] = [stability_limit(method) for method in methods]
    return rows


_NAMES = ("no delay", "delay 1", "delay 1 + EF", "Nesterov, no delay", "Nesterov, delay 1", "Nesterov, delay 1 + EF")

TABLES: dict[str, Callable[[], Table]] = {
    f.__name__: f for f in (delays, limits, tuned, orders, noise, orbits, adam, staleness)
}


def _six_methods(beta: float) -> list[Method]:
    """In the order of ``_NAMES``."""
    return [
        Method(beta, delay, strength, nesterov)
        for nesterov in (False, True)
        for delay, strength in ((0, 0.0), (1, 0.0), (1, 1.0))
    ]
