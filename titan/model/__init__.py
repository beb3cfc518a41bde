"""The model axis: shapes and counts (`schema`), layers (`layers`) and the models built from them."""
