"""Audits of the library: does what it releases keep the privacy that it claims?"""
