"""A small DeepSeek-V3 that was trained on Jane Austen's novels: its weights, and all that made and measures them."""
