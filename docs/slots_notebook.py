# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Slots in a notebook
#
# This notebook loads the demo encoder, draws where its slots attend, and compares images slot by slot. It needs no GPU
# and no download. `jupytext --to notebook docs/slots_notebook.py` writes it as a Jupyter notebook.

# %%
import matplotlib.pyplot as plt
import torch

import dino_sparo
from dino_sparo.data.scenes.images import Scenes

encoder = dino_sparo.load_encoder("demo")
print(encoder.summary)

# %% [markdown]
# The demo encoder was trained on built-in images. Here are six held-out images. Use `PIL.Image.open("photo.jpg")` for
# your own images. The demo encoder has never seen a photograph, so do not expect good slots there.

# %%
scenes = Scenes(num_images=200, image_size=96, split="val")
pictures = [scenes.read(index) for index in range(200)]
figure, axes = plt.subplots(1, 6, figsize=(12, 2.4))
for axis, index in zip(axes, range(6), strict=True):
    axis.imshow(pictures[index])
    axis.set_title(scenes.classes[scenes.labels[index]])
    axis.axis("off")
plt.show()

# %% [markdown]
# ## From an image to slots
#
# `readout_output` returns the slots and their attention over the tokens: the class token, then the patches.

# %%
images = encoder.transform(pictures)
with torch.no_grad():
    output = encoder.readout_output(images)
print("images   ", tuple(images.shape))
print("slots    ", tuple(output.slots.shape), "(images, slots, width)")
print("attention", tuple(output.attention.shape), "(images, slots, tokens)")

# %% [markdown]
# ## Where slots attend
#
# A slot's attention sums to one over the tokens. Beside each image are the four slots with the most concentrated
# attention.

# %%
patches = output.attention[..., encoder.backbone.num_prefix_tokens :]
side = int(patches.shape[-1] ** 0.5)
entropy = -(patches * patches.clamp(min=1e-9).log()).sum(-1).mean(0)
slots = entropy.argsort()[:4].tolist()
figure, axes = plt.subplots(4, 5, figsize=(10, 8.4))
for row, index in enumerate(range(4)):
    axes[row, 0].imshow(pictures[index])
    for column, slot in enumerate(slots, start=1):
        axes[row, column].imshow(patches[index, slot].reshape(side, side), cmap="inferno")
        axes[0, column].set_title(f"slot {slot}")
axes[0, 0].set_title("image")
for axis in axes.flat:
    axis.axis("off")
plt.show()

# %% [markdown]
# ## Compare images slot by slot
#
# The encoding gives one similarity of two images, and so does each slot. Here are the first scene and its nearest
# scenes, by the encoding and by two slots.


# %%
def nearest(features: torch.Tensor, index: int, number: int = 5) -> list[int]:
    """The image itself, then the images whose features are most similar to its features by cosine."""
    unit = torch.nn.functional.normalize(features, dim=-1)
    return (unit @ unit[index]).argsort(descending=True)[: number + 1].tolist()


rows = {"encoding": output.slots.flatten(1)} | {f"slot {slot}": output.slots[:, slot] for slot in slots[:2]}
figure, axes = plt.subplots(len(rows), 6, figsize=(12, 2.2 * len(rows)))
for axis_row, (name, features) in zip(axes, rows.items(), strict=True):
    for axis, index in zip(axis_row, nearest(features, 0), strict=True):
        axis.imshow(pictures[index])
        axis.axis("off")
    axis_row[0].set_title(name)
plt.show()

# %% [markdown]
# ## Next
#
# - [Train your own encoder](first_encoder.md).
# - [Which slots does a task need?](slot_score.md)
# - [What slots are, and when they help](slots.md).
