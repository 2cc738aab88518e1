"""Rewriting: tables of rules, one file for each, and the driver that applies them."""
