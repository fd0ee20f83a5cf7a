"""Reflection probes on the tiny task: does a model notice an error that it is given?"""
