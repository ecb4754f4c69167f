"""Attention: the public function, its operators, the private boundary and rotary positions."""
