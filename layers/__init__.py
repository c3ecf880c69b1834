"""Layers as Equinox modules, the attention algorithms, and the sharding plan.

The attention algorithms take global arrays, a mask and a mesh, and serve any model: q `[batch seq heads head_dim]`, k
and v `[batch kv_seq kv_heads head_dim]`.
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
