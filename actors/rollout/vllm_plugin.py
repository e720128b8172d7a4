# pyright: basic
# vLLM is typed only in part.
"""What vLLM loads in each of its processes (entry point `vllm.general_plugins`) before it loads a model."""

ENGINE_NAME = "headrace"


def register() -> None:
    """Make weight updates possible: register the transfer engine, and keep weights where updates can reach them.

    vLLM may call this several times in a process.
    """
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    from vllm.platforms import current_platform

    if ENGINE_NAME not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            ENGINE_NAME, "headrace.actors.rollout.vllm_weights", "HeadraceTransferEngine"
        )
    if current_platform.is_cpu():
        import vllm._custom_ops

        # oneDNN computes with a packed copy of each weight: an update would arrive, verify and change nothing.
        vllm._custom_ops._supports_onednn = False
