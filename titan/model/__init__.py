"""The model axis: shapes and counts (`schema`), building blocks (`layers`) and the models made of them."""
