"""python -m evotune"""

from evotune.cli import main

main()
