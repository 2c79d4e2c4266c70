"""Tickets: an update runs under the hyper-parameters of its mini-batch, and the present is put back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning_asyncpp.core.updates.ticket import TicketOffice
from torch import nn

from tests.core.cases import CountingSGD


def one_parameter() -> nn.Parameter:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    return parameter


def test_the_step_sees_the_ticket_and_the_present_comes_back() -> None:
    optimizer = torch.optim.AdamW([{"params": [one_parameter()]}, {"params": [one_parameter()], "lr": 0.5}], lr=0.1)
    office = TicketOffice(optimizer)
    ticket = office.file()
    optimizer.param_groups[0].update(lr=0.01, betas=(0.1, 0.2))
    optimizer.param_groups[1].update(lr=0.02, weight_decay=3.0)
    with office.redeemed(ticket):
        assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.5]
        assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)
        assert optimizer.param_groups[1]["weight_decay"] == 0.01
        optimizer.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.02]
    assert optimizer.param_groups[0]["betas"] == (0.1, 0.2)
    assert optimizer.param_groups[1]["weight_decay"] == 3.0


def test_a_ticket_is_a_copy() -> None:
    optimizer = torch.optim.SGD([one_parameter()], lr=torch.tensor(0.1))
    optimizer.param_groups[0]["extra"] = {"values": [1]}
    ticket = TicketOffice(optimizer).file()
    optimizer.param_groups[0]["lr"].fill_(7.0)
    optimizer.param_groups[0]["extra"]["values"].append(2)
    assert ticket.groups[0]["lr"].item() == pytest.approx(0.1)
    assert ticket.groups[0]["extra"] == {"values": [1]}
    assert "params" not in ticket.groups[0]


def test_tensor_hyper_parameters_are_set_and_put_back() -> None:
    optimizer = torch.optim.SGD([one_parameter()], lr=torch.tensor(0.5))
    office = TicketOffice(optimizer)
    ticket = office.file()
    optimizer.param_groups[0]["lr"].fill_(0.25)
    with office.redeemed(ticket):
        optimizer.step()
    assert optimizer.param_groups[0]["params"][0].tolist() == [0.5, 0.5]
    assert optimizer.param_groups[0]["lr"].item() == 0.25


def test_what_the_step_counts_is_its_own() -> None:
    optimizer = CountingSGD([one_parameter()], lr=0.1)
    office = TicketOffice(optimizer)
    tickets = [office.file()]
    for t in range(1, 5):
        optimizer.param_groups[0]["lr"] = 0.1 / (t + 1)
        tickets.append(office.file())
        with office.redeemed(tickets[t - 1]):
            assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / t)
            optimizer.step()
        assert optimizer.param_groups[0]["count"] == t
        assert optimizer.param_groups[0]["largest_lr"] == 0.1
        assert optimizer.param_groups[0]["lr"] == 0.1 / (t + 1)


def test_a_value_that_the_step_changes_late_is_its_own_from_then_on() -> None:
    class Late(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            self.param_groups[0]["seen"] = max(self.param_groups[0]["seen"], self.param_groups[0]["lr"] - 0.2)

    optimizer = Late([one_parameter()], lr=0.1)
    optimizer.param_groups[0]["seen"] = 0.0
    office = TicketOffice(optimizer)
    for lr in (0.1, 0.2, 0.5, 0.1, 0.3):
        optimizer.param_groups[0]["lr"] = lr
        ticket = office.file()
        with office.redeemed(ticket):
            optimizer.step()
    assert optimizer.param_groups[0]["seen"] == pytest.approx(0.3)


def test_new_keys_are_left_alone() -> None:
    optimizer = torch.optim.SGD([one_parameter()], lr=0.1)
    office = TicketOffice(optimizer)
    ticket = office.file()
    optimizer.param_groups[0]["later"] = 1
    with office.redeemed(ticket):
        assert optimizer.param_groups[0]["later"] == 1
    assert optimizer.param_groups[0]["later"] == 1
