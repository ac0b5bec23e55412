# What Doxygen and Sphinx read of the headers, where they cannot read what is there.
# Sphinx shows one exception for each @throws: the others become a part of the text.
s/@throws ([A-Za-z]+), ([A-Za-z, ]*[a-z])  /@throws \1 or \2: /
# Sphinx knows no designated initialisers in default arguments.
s/\(MxOptions options = \{\.rule = (\w+::\w+)\}\)/(MxOptions options = MxOptions{\1})/
# To Doxygen `local = 0` is an expression of another language.
s/int local = 0;/int local{0};/
