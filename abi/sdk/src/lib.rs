//! What the author of a mlxcel family plugin links: tensors, layers, weights, config, export macro, test kit.
