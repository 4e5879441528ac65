"""The torch engine on one GPU, with random weights of real shapes: is it right, and how fast is it?"""
