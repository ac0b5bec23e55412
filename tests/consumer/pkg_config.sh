#!/bin/sh
# usage: pkg_config.sh PACKAGE LIBRARY C-COMPILER SOURCE PROGRAM [ARGUMENT...]
# Compiles a program with what pkg-config says of the package, and nothing else; LIBRARY is how the program must find Ferry:
# `libferry.so.VERSION`; `none`: it is linked in; `static`: so is everything, libc too. Then runs the program.
set -eu
package=$1 library=$2 compiler=$3 source=$4 program=$5
shift 5
names=libferry static=
[ "$library" != static ] || names='' static=-static
compile() { "$compiler" -std=c99 $static "$source" -o "$program" "$@"; }
# pkg-config quotes for a shell: the folder of Ferry may have spaces.
eval "compile $(pkg-config ${static:+--static} --cflags --libs "$package")"
needed=$(readelf -d "$program" | sed -n "s/.*NEEDED.*\[\($names.*\)\]/\1/p")
case $library in static | none) library='' ;; esac
[ "$needed" = "$library" ] || { echo "needs ${needed:-no library of Ferry}, not ${library:-none}" && exit 1; }
eval "LD_LIBRARY_PATH=$(pkg-config --variable=libdir "$package")"
export LD_LIBRARY_PATH
"./$program" "$@"
