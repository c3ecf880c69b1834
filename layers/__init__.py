"""Layers as Equinox modules, the attention algorithms, and the sharding plan.

- `attention`: algorithms for any model, on arrays; this package exports them.
- `parallel`: meshes, the sharding of arrays by their dims, programs compiled ahead of time.
- `nn`: the layers of a model, as modules. A new layer goes here.
- `operations`: how queries meet keys in a forward pass, in training, decoding or densely. A new cache goes here.

The exported functions take global arrays, q `[batch seq heads head_dim]`, k and v `[batch kv_seq kv_heads head_dim]`;
`ring_attention`, `gather_attention` and `tree_attention` take a mesh too. Arrays `[batch heads seq head_dim]` must be
transposed first: where seq and heads are equal nothing can tell the two layouts apart.
"""

if __name__ != "treering.layers":
    # As a package of its own it would be a second copy, with second classes of every name.
    raise ImportError("import treering.layers, and take the root of Treering's repository off sys.path")


from treering.layers.attention.dense import dense_attention as dense_attention
from treering.layers.attention.distributed.arguments import AttentionMesh as AttentionMesh
from treering.layers.attention.distributed.arguments import TokenData as TokenData
from treering.layers.attention.distributed.gather import gather_attention as gather_attention
from treering.layers.attention.distributed.ring import ring_attention as ring_attention
from treering.layers.attention.distributed.tree import tree_attention as tree_attention
from treering.layers.attention.distributed.tree import tree_combine as tree_combine
from treering.layers.attention.energy import attention_energy as attention_energy
from treering.layers.attention.local import local_attention as local_attention
from treering.layers.attention.mask import Mask as Mask
from treering.layers.attention.order import from_order as from_order
from treering.layers.attention.order import to_order as to_order
from treering.layers.attention.partial import Partial as Partial
from treering.layers.attention.partial import merge as merge
