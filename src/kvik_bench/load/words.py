"""Common English words: with the space before it, each is one token in most vocabularies."""

from __future__ import annotations

from typing import Final

_TEXT: Final = """
about above across action after again against age air almost alone along already also always among
animal another answer any apple arm around art ask away baby back bad ball bank base bed been
before begin behind below best better between big bird black blood blue board boat body book born
both bottom box boy break bright bring brother brown build bus busy buy call came can car care
carry case cat cause center chair chance change check child city class clean clear close coat cold
color come common cook cool copy corn could count country course cover cross cry cut dance dark
day dead deal dear deep did different dinner do doctor dog done door down draw dream dress drink
drive drop dry each ear early earth east easy eat edge egg eight else end enough even evening ever
every eye face fact fall family far farm fast father fear feel feet few field fight fill find fine
finger finish fire first fish five floor flower fly follow food foot for form found four free
fresh friend from front fruit full game garden gave get girl give glad glass go gold gone good got
grass great green ground group grow had hair half hand happy hard has hat have he head hear heart
heat heavy help her here high hill him his hold hole home hope horse hot hour house how hundred
ice idea if in inside into is it job join jump just keep kind king kitchen knew know lady lake
land large last late laugh lay lead learn leave left leg less let letter life light like line list
little live long look lost lot love low made make man many map mark may mean meat meet men middle
might mile milk mind minute miss money month moon more morning most mother mountain mouth move
much music must my name near neck need never new next nice night nine no north nose not note
nothing now number of off often oil old on once one only open or other our out over own page paper
park part party pass past pay people person picture piece place plan plant play point poor power
press pretty pull push put question quick quiet rain ran reach read ready real red rest rich ride
right ring river road rock room round run safe said salt same sand sat save saw say school sea
second see seed sell send set seven shall she ship shoe shop short should show side sign sing
sister sit six skin sky sleep slow small smile snow so soft some son song soon sound south space
speak spring stand star start stay step still stone stop store story street strong such summer sun
sure table take talk tall teach tell ten than thank that the their them then there these they
thing think this three through time to today together told too took top town tree trip true try
turn two uncle under until up us use very voice wait walk wall want war warm was wash watch water
way we wear week well went were west what wheel when where which white who why wide wife wild will
wind window winter wish with woman wood word work world would write year yellow yes yet you young
your
"""

WORDS: Final = tuple(_TEXT.split())
