"""Rules for sharing besides Naive and HACPO: one file, one equation, one paper each (``docs/methods.md``).

The papers build on GRPO. Here every rule keeps the GSPO objective for own responses, as HACPO and Naive do.
So the rules differ in nothing but what they make of other agents' responses, and can be compared. What a
paper leaves open, or what had to change with that, stands under "Our reading" in the rule's file.
"""
