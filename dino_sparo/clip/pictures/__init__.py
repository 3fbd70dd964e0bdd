"""What the slots of a CLIP look at, in image and caption.

draw.py        a model and pairs -> the sheet and the page
concepts.py    which slots and pairs are worth a look
words.py       tokens -> words and their attention
sheet.py       the PNG
page.py        the HTML page
"""
