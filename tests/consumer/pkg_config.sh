#!/bin/sh
# usage: pkg_config.sh PACKAGES LIBRARIES C-COMPILER SOURCE PROGRAM [ARGUMENT...]
# Compiles a program with what pkg-config says of the packages, and nothing else; LIBRARIES is how the program must find Ferry:
# `libferry.so.VERSION` and those above it, sorted; `none`: it is linked in; `static`: so is everything, libc too. Then runs the program.
set -eu
packages=$1 libraries=$2 compiler=$3 source=$4 program=$5
shift 5
names=libferry static=
[ "$libraries" != static ] || names='' static=-static
compile() { "$compiler" -std=c99 $static "$source" -o "$program" "$@"; }
# pkg-config quotes for a shell: the folder of Ferry may have spaces.
eval "compile $(pkg-config ${static:+--static} --cflags --libs "$packages")"
needed=$(readelf -d "$program" | sed -n "s/.*NEEDED.*\[\($names.*\)\]/\1/p" | LC_ALL=C sort | paste -sd ' ')
case $libraries in static | none) libraries='' ;; esac
[ "$needed" = "$libraries" ] || { echo "needs ${needed:-no library of Ferry}, not ${libraries:-none}" && exit 1; }
eval "LD_LIBRARY_PATH=$(pkg-config --variable=libdir ferry)"
export LD_LIBRARY_PATH
"./$program" "$@"
