# pyright: reportMissingImports=false
"""A weight transfer backend for vLLM: a safetensors file on the same machine. Runs in vLLM's workers.

vLLM's own backends need GPUs (nccl, ipc). Registered when a worker imports its extension class; vLLM then drives
start, update, finish.
"""

from dataclasses import dataclass

from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload


class Extension:
    """vLLM mixes this into its worker; importing it is all it is for."""


@dataclass
class FileInitInfo(WeightTransferInitInfo):
    """There is no connection to make."""


@dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):
    path: str
    version: str  # must be the file's


class FileTransfer(WeightTransferEngine[FileInitInfo, FileUpdateInfo]):
    """Whole models only: what a file lacks is an error."""

    init_info_cls = FileInitInfo
    update_info_cls = FileUpdateInfo

    def init_transfer_engine(self, init_info: FileInitInfo) -> None:
        self._wanted = {name for name, _ in self.model.named_parameters()}

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: FileUpdateInfo) -> None:
        """After a failure the model is in one piece again, so that another update can start, but its weights may be
        mixed: whoever sent them must not let it act."""
        try:
            self._read(update_info)
        except BaseException:
            finalize_layerwise_reload(self.model, self.model_config)
            raise

    def _read(self, update_info: FileUpdateInfo) -> None:
        with safe_open(update_info.path, framework="pt") as file:
            version = (file.metadata() or {}).get("version")
            if version != update_info.version:
                raise ValueError(f"the file has version {version}, wanted {update_info.version}")
            loaded = self.model.load_weights((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118
        if missing := sorted(self._wanted - set(loaded)):
            raise ValueError(f"the file lacks {len(missing)} of {len(self._wanted)} parameters: {missing[:3]}")

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        # A head that is tied to the input embedding has its new values by now, but on the CPU it computes with a packed
        # copy of them, which reloading makes anew only for layers that a file names (vLLM 0.32).
        for layer in self.model.modules():
            if isinstance(layer, ParallelLMHead):
                layer.quant_method.process_weights_after_loading(layer)

    def shutdown(self) -> None:
        """Nothing to free."""


WeightTransferEngineFactory.register_engine("file", FileTransfer)
