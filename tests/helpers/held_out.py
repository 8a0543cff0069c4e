"""A story that no model was trained on: written for these tests, to measure quality with."""

from __future__ import annotations

TEXT = """\
The Clockmaker's Goose

In a small town at the foot of a green hill there lived an old clockmaker whose name was Tobin. He
had a narrow shop with a blue door, and in the window of the shop stood nineteen clocks, and no two
of them ever agreed about the time. The people of the town laughed at this, but they were fond of
him, and whenever a watch stopped or a bell would not ring they brought it to the blue door, and he
mended it for a loaf of bread or a basket of plums.

One evening in autumn, when the wind was throwing leaves against the glass, there came a knock so
low that Tobin thought at first it was the wind itself. He opened the door and saw nobody. Then he
looked down, and there upon the step stood a grey goose with a broken wing.

"If you please," said the goose, "may I come in out of the rain?"

"Certainly," said the old man, who had lived alone for so long that he was glad of any company.
"But I warn you that it is not quiet in here. My clocks talk all night."

"I do not mind talk," said the goose, "so long as there is a fire."

So he carried her to the hearth, and he bound up her wing with a strip of linen and a thin brass
rod that had once been the hand of a clock. He gave her barley in a saucer, and she ate every grain
of it. Then she put her head under the good wing and slept, and the nineteen clocks struck the hour
one after another until it was nearly time to begin again.

The goose stayed through the winter. In the morning she walked about the shop and looked at each of
the clocks with one eye and then with the other, and in the evening she sat by the fire and told
the old man what she had seen from the air: rivers that shone like wire, and towers no larger than
thimbles, and a lake in the north where the ice sang before it broke. Tobin listened and filed his
little wheels, and he thought that he had never been so happy.

Now it happened that the king of that country was a proud man who could not bear to wait for
anything. He had heard that there was a clockmaker under the green hill, and he sent three soldiers
to fetch him. When the old man stood before the throne with his cap in his hands, the king said to
him, "I wish to have a clock that is never late. Make me such a clock before the first day of
spring, and you shall have a purse of gold. But if it is late by so much as a minute, I will have
your nineteen clocks thrown into the river, and your blue door nailed shut."

The old man went home with a heavy heart. He worked all day and half of every night. He made one
clock of silver and one of oak, and one that was driven by water, and all of them were good clocks,
but each was a little fast or a little slow, as clocks are. When the last week of winter had come
he laid down his file and put his face in his hands.

"What is the matter?" asked the goose.

Tobin told her. She thought about it for a while, standing on one leg.

"I know something about being on time," she said at last. "When the days begin to grow longer, all
the geese of the south rise up on the same morning and fly north. Nobody rings a bell for us, and
yet not one of us is late. I will tell you how it is done. We do not ask what hour it is. We ask
the sun."

Then the old man lifted his head. He took a flat stone from the garden and a straight rod of iron,
and he cut the hours into the stone with a chisel, with the goose walking round and round it to
tell him where the shadow would fall. On the first day of spring he loaded the stone upon a cart,
and he drove to the palace with the grey bird beside him on the seat.

"What is this?" cried the king. "It has no wheels and no bell. It does not even tick!"

"Sire," said the clockmaker, "it is the only clock in your kingdom that is never late. It does not
follow the sun, as mine do, and lose its way. It waits for the sun to come to it."

The king looked at the shadow, and he looked at the sky, and for once he could find nothing to say.
At that moment the bells of the city began to strike noon, some early and some behind, and the
shadow of the iron rod lay as straight as a thread upon the middle of the stone. Then the king
laughed, for the first time in many years, and he gave the old man the purse of gold and a second
purse for the goose.

"And what do you do at night," the king asked, "or when it rains?"

"Then," said the goose, who was not afraid of anybody, "you must wait, like everyone else."

It is told that the king kept the stone in his garden as long as he lived, and that he grew so used
to sitting beside it that he became a patient man. As for the goose, her wing was whole again, and
when her brothers and sisters went over the town, calling, she rose from the roof of the shop and
flew away with them to the singing lake. But every autumn, on the same evening, there was a low
knock at the blue door, and the old man had the fire lit and the barley ready, for he knew that she
would not be late.
"""
