"""The SGLang plugin: packed state pool, decode and prefill on packed pages. Active when STEPQUANT_PLAN names a plan."""
