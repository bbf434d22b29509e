"""Everything that touches SGLang or HTTP."""
