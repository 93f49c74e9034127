"""A callback that uploads ``final/`` to the Hugging Face hub when a run has completed."""

from pathlib import Path
from typing import Any

from nemo_like.config.run import RunConfig
from nemo_like.errors import RunError, UserError


class PushToHub:
    """Uploads to the repository ``repo``, with the token of ``hf auth login`` or HF_TOKEN."""

    def __init__(self, repo: str, private: bool = True) -> None:
        self._repo, self._private = repo, private

    def on_start(self, folder: Path, config: RunConfig, step: int) -> None:
        """Create the repository now, so that a refusal by the hub shows before training."""
        from huggingface_hub import HfApi  # slow to import

        if not config.checkpoint.export:
            raise UserError("push_to_hub needs final/; leave out checkpoint.export=false.")
        self._folder, self._hub = folder / "final", HfApi()
        self._hub.create_repo(self._repo, private=self._private, exist_ok=True)

    def on_end(self, summary: dict[str, Any]) -> None:
        try:
            self._hub.upload_folder(
                repo_id=self._repo,
                folder_path=self._folder,
                commit_message=f"{summary['steps']} steps of nemo-like",
            )
        except Exception as error:  # network, quota, rights: the model itself is safe
            raise RunError(
                f"push_to_hub: {self._folder} is complete, and could not be uploaded ({error}); "
                f"run hf upload {self._repo} {self._folder}"
            ) from error
