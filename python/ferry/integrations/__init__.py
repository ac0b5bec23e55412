"""Ferry inside other systems, by their own plug-in mechanisms: no file of the host changes.

`ferry.integrations.transformers` spreads the experts of Hugging Face transformers' models over ranks, and
`ferry.integrations.flashinfer` is a communication backend of FlashInfer's expert-parallel layer. `ferry.integrations.vllm` and
`ferry.integrations.sglang` are plug-ins that those engines find by entry points. A module imports its host when a function
needs it, so importing the module needs neither the host nor PyTorch.
"""
