"""Checking a kernel: a table of checks, each a function from the kernel to its findings.

    subject ──> check, one after the other, those that run code in processes of their own ──> report

A check that cannot be made raises `NotRun`; whatever else it raises, and a process that dies in it, is a finding.
"""

from __future__ import annotations

from .report import Finding, Outcome, Report
from .runner import check
from .table import CHECKS, Check

__all__ = ["CHECKS", "Check", "Finding", "Outcome", "Report", "check"]
