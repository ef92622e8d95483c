"""Measurements that are made by hand, never by the tests."""
